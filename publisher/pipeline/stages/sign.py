"""Sign: the staged tree gets one signature over all of its files, where the manifest asks for one.

How it is made and checked is the business of `release/signing.py`. It refuses to go on where the run publishes and
nobody here can sign. A dry run and a rehearsal do what can be done here, and go on without a signature where that is
nothing.
"""

from typing import TYPE_CHECKING

from publisher.hub.client import THE_HUB
from publisher.records.publication import Signing
from publisher.release.signing import Means, sign_release

if TYPE_CHECKING:
    from publisher.pipeline.sites import ReleaseSite


def sign(site: "ReleaseSite") -> Signing | None:
    """Sign the staged tree, unless the signature that is there or published still holds.

    Returns:
        Whose signature it is; None where the manifest asks for none.

    Raises:
        PushError: the staged tree is not a whole release.
        SigningError: what it takes to sign is not at hand.
    """
    options, manifest = site.options, site.manifest
    if manifest.sign is not None:
        site.progress("signing")
    at = site.hub if options.writes else None if manifest.is_local else THE_HUB
    means = Means(options.signing_key, published_at=at, publishing=options.writes and not options.rehearse)
    return sign_release(manifest, site.staged, means=means)
