"""How a stage's function is called, where it takes other arguments than the site: what it gets of the run.

Imports stand in the functions: a stage's module, with torch and others, is imported when it runs.
"""

from typing import TYPE_CHECKING

from publisher.errors import PushError

if TYPE_CHECKING:
    from publisher.engines import Engine
    from publisher.pipeline.checkpoints import Pair
    from publisher.pipeline.sites import ReleaseSite, VariantSite
    from publisher.records.extraction import Extraction
    from publisher.records.publication import CommitPlan, Pushed, PushOutcome, Signing
    from publisher.records.validation import Validation
    from publisher.records.verification import Verification


def _at_work(site: "VariantSite") -> "tuple[Pair, Engine]":
    """Return what a stage that reads tensors works with."""
    from publisher.pipeline.checkpoints import Pair

    pair = site.given("fetch", Pair)
    if pair is None or site.engine is None:
        raise ValueError("nothing was fetched, or no engine is there")  # the loop in run sees to both
    return pair, site.engine


def fetch(site: "VariantSite") -> "Pair":
    """Fetch both checkpoints of the variant."""
    from publisher.pipeline.checkpoints import fetched_pair

    return fetched_pair(site)


def extract(site: "VariantSite") -> "Extraction":
    """Extract the adapter, and see that its checkpoints stayed as they were meanwhile."""
    from publisher.pipeline.checkpoints import require_unchanged
    from publisher.pipeline.stages import extract as stage

    pair, engine = _at_work(site)
    extraction = stage.extract(
        site.variant,
        base=pair.base,
        tuned=pair.tuned,
        staged=site.staged,
        work=site.kept(""),
        engine=engine,
        progress=site.progress,
    )
    require_unchanged(site, pair)
    return extraction


def validate(site: "VariantSite") -> "Validation":
    """Validate the written adapter, and keep what was seen."""
    from publisher.pipeline.checkpoints import extraction_of
    from publisher.pipeline.stages import validate as stage

    pair, engine = _at_work(site)
    validation = stage.validate(
        site.variant,
        extraction_of(site, pair),
        base=pair.base,
        tuned=pair.tuned,
        staged=site.staged,
        engine=engine,
        progress=site.progress,
    )
    validation.write(site.kept("validation.json"))
    return validation


def verify(site: "VariantSite") -> "Verification":
    """Ask both models, and hold their answers together."""
    from publisher.pipeline.checkpoints import extraction_of
    from publisher.pipeline.stages import verify as stage

    pair, engine = _at_work(site)
    inputs = stage.Inputs(
        base=pair.base,
        tuned=pair.tuned,
        fp8=pair.fp8,
        request_files=site.request_files,
        model_gpus=site.options.model_gpus,
    )
    return stage.verify(
        site.variant,
        extraction_of(site, pair),
        inputs=inputs,
        staged=site.staged,
        work=site.kept(""),
        engine=engine,
        progress=site.progress,
    )


def require_signer(site: "ReleaseSite") -> None:
    """Raise unless a signature is there, or what it takes is at hand, before a real push; a named key is the right one.

    Raises:
        SigningError: no private key or another than the manifest's; no identity or another.
    """
    from publisher.release.signing import is_signed, require_means

    asked, options = site.manifest.sign, site.options
    if asked is None:
        return
    must = options.writes and not options.rehearse and not is_signed(site.manifest, options.staged)
    if must or (options.signing_key is not None and asked.key is not None):
        require_means(asked, options.signing_key)


def require_writable(site: "ReleaseSite") -> None:
    """Raise if the push would fail in the end for a reason that can be known at the start.

    Raises:
        PushError: what this manifest or these options do not allow.
        HubError: no token, one that may not write, or a reference that readers could not check.
    """
    from publisher.pipeline.stages.push import preflight

    if site.options.writes:
        site.progress("checking that the Hub can be written to")
        preflight(site.manifest, site.target)


def sign(site: "ReleaseSite") -> "Signing | None":
    """Sign the staged tree; where the run publishes, only one that may be published."""
    from publisher.pipeline.publishable import require_publishable
    from publisher.pipeline.stages import sign as stage

    if site.options.writes:
        require_publishable(site)
    return stage.sign(site)


def push(site: "ReleaseSite") -> "Pushed | CommitPlan":
    """Push the staged tree; a dry run only plans the commit."""
    from publisher.pipeline.stages import push as stage
    from publisher.release.commitplan import dry_plan

    if site.options.dry_run:
        site.progress("planning the commit")
        return dry_plan(site.manifest, site.staged)
    site.progress(f"pushing to {site.hub.label}")
    return stage.push(site.manifest, site.staged, target=site.target, progress=site.progress)


def read_back(site: "ReleaseSite") -> "PushOutcome":
    """Read back what was pushed; where this run pushed nothing, what the branch holds."""
    from publisher.pipeline.stages import read_back as stage
    from publisher.records.publication import Pushed, PushOutcome
    from publisher.release.commitplan import staged_files

    pushed = site.given("push", Pushed) or _there(site)
    files = staged_files(site.manifest, site.staged)
    published = stage.Published(site.manifest.repo, pushed.commit, files=files, at=site.hub)
    found = stage.read_back(site.manifest, site.staged, published=published, progress=site.progress)
    return PushOutcome(**pushed.model_dump(), read_back=found)


def _there(site: "ReleaseSite") -> "Pushed":
    """Return the state of the branch, as a push that changed nothing."""
    from publisher.records.publication import Pushed
    from publisher.release.commitplan import head_of

    repo, at = site.manifest.repo, site.hub
    head = head_of(repo, at)
    if head is None:
        raise PushError(
            f"there is no repository {repo} on {at.label} to read back from", next_step="publish push first"
        )
    url = f"{at.address}/{repo}/tree/{head}"
    return Pushed(hub=at.label, result="no changes", commit=head, url=url, tag=None, recovered=False)
