"""Card: README.md, its charts and the manifest's copy are written from the JSON artefacts alone.

How the card reads is the business of `release/card.py`. It refuses evidence that is missing or not the manifest's.
"""

from typing import TYPE_CHECKING

from publisher.records.filenames import CARD, MANIFEST
from publisher.records.files import write_text
from publisher.records.publication import CardChange
from publisher.release.card import stale_charts

if TYPE_CHECKING:
    from publisher.pipeline.sites import ReleaseSite


def card(site: "ReleaseSite") -> CardChange:
    """Write the card, its charts and the manifest's copy; return whether the card or a chart changed.

    Raises:
        CardError: evidence is missing or not the manifest's, or a template is wrong.
        FetchError: an artefact is damaged.
    """
    site.progress("rendering the card")
    files, readme = site.rendered_card(), site.staged / CARD
    stale = stale_charts(site.manifest, files, site.staged)
    changed = bool(stale) or not readme.is_file() or readme.read_bytes() != files[CARD].encode()
    for path in stale:
        (site.staged / path).unlink(missing_ok=True)
    for path, text in files.items():
        write_text(site.staged / path, text)
    write_text(site.staged / MANIFEST, site.options.manifest_file.read_text(encoding="utf-8"))
    return CardChange(changed=changed)
