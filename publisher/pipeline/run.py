"""The run: each stage of the table is reused where its earlier result holds, and runs where it does not.

A finished stage leaves a marker in the work folder: the digest of everything that it rests on (checkpoints, settings,
the code that decides), and of what it wrote. As long as both hold its result is reused, also on another machine:
extraction.json and validation.json state the device and the packages they were made with. DIST/NAME is the staged
tree, byte for byte what is pushed; DIST/NAME.work holds what is not.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from publisher.errors import ManifestError
from publisher.hub.client import embedded
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Manifest, Variant
from publisher.pipeline.markers import key_of, lapse, mark_finished, require_as_left
from publisher.pipeline.options import Run
from publisher.pipeline.sites import ReleaseSite, VariantSite
from publisher.pipeline.stages.push import Target
from publisher.pipeline.table import NAMES, OF_RELEASE, OF_VARIANT, SiteT, Stage
from publisher.records.extraction import Extraction
from publisher.records.files import room_in
from publisher.records.loaders import Loaders
from publisher.records.lock import locked
from publisher.records.outcome import Outcome, VariantOutcome
from publisher.records.progress import Progress
from publisher.records.publication import CardChange, CommitPlan, Pushed, PushOutcome, Signing
from publisher.records.validation import Validation
from publisher.records.verification import Verification

__all__ = ["Run", "run"]


def run(options: Run, progress: Progress) -> Outcome:
    """Run the stages from `first` to `last`.

    Raises:
        PublisherError: a stage failed; what was finished is kept.
        BusyError: another run works on the same output.
    """
    manifest = load_manifest(options.manifest_file)
    chosen = _chosen(manifest, options.variants)
    with _target(options) as target:
        hashed = set[Path]()
        variants = [VariantSite(options, manifest, progress, variant, hashed=hashed) for variant in manifest.variants]
        release = ReleaseSite(options, manifest, progress, target, tuple(variants))
        _look_ahead(OF_RELEASE, release)
        with room_in(options.dist, name="the output", size=0), locked(options.work):
            _clear_partial_files(options)
            outcomes = _of_variants([site for site in variants if site.variant in chosen], options)
            work_through(OF_RELEASE, release)
    return _outcome(release, outcomes)


def _clear_partial_files(options: Run) -> None:
    """Remove what a run that was killed had half written: it is no part of a release, nor of use to this run."""
    for folder in (options.staged, options.work):
        for path in folder.rglob(".*.partial"):
            path.unlink()


def _chosen(manifest: Manifest, paths: Sequence[str]) -> tuple[Variant, ...]:
    known = {variant.path: variant for variant in manifest.variants}
    wanted = [path if path.endswith("/") else f"{path}/" for path in paths]
    unknown = [path for path in wanted if path not in known]
    if unknown:
        raise ManifestError(
            f"the manifest has no variant at {', '.join(unknown)}", expected=f"one of {', '.join(known)}"
        )
    return tuple(known[path] for path in wanted) or manifest.variants


@contextmanager
def _target(options: Run) -> Iterator[Target]:
    """Give where to push; for a rehearsal, an embedded Hub that runs during the block and keeps its repositories."""
    if not options.rehearse:
        yield Target(tag=options.tag, pull_request=options.pull_request)
        return
    from publisher.hub.local import LocalHub

    with LocalHub(options.work / "hub") as local, embedded(local.endpoint, local.token) as destination:
        yield Target(destination, tag=options.tag, pull_request=options.pull_request)


# --- the loop -----------------------------------------------------------------------------------------------


def work_through(stages: Sequence[Stage[SiteT]], site: SiteT) -> tuple[str, ...]:
    """Work through the stages that the run includes, in their order: each is reused where it holds, or else runs.

    A stage that is needed on demand runs when the first that needs it will: so nothing is fetched where nothing is
    read, and what is fetched is there before it is known which results still hold for it.

    Args:
        stages: those of the site's kind, in their order.
        site: the variant or the release; what the stages give is put into its `found`.

    Returns:
        The names of those whose earlier results were reused.

    Raises:
        PublisherError: a stage failed, or what an earlier run left for it is not there.
    """
    included = [stage for stage in stages if site.options.includes(stage.name)]
    _remove_files_of_other_manifests(included, site)
    lapses = _lapses(included, site)
    _report(lapses, included, site=site)
    reused = []
    for stage in stages:
        if stage.on_demand:
            if stage.name == site.options.last or _is_needed(stage, stages, lapses):
                site.found[stage.name] = stage.run(site)
            elif stage in included:
                site.progress(f"{site.staged}: what rests on {stage.name} holds, so it does not run")
        elif stage.name in lapses:
            if _is_asked_for(stage, site) or lapse(stage, site):
                _run(stage, stages, site=site)
            else:
                reused.append(stage.name)
    return tuple(reused)


def _look_ahead(stages: Sequence[Stage[SiteT]], site: SiteT) -> None:
    """Find what would make a stage of this run fail in the end, as far as it can be known at the start."""
    included = [stage for stage in stages if site.options.includes(stage.name) and stage.applies(site)]
    needed = {name for stage in included for name in stage.needs}
    for stage in stages:
        if stage.before is not None and (stage in included or (stage.on_demand and stage.name in needed)):
            stage.before(site)


def _remove_files_of_other_manifests(included: Sequence[Stage[SiteT]], site: SiteT) -> None:
    """Remove what stages have left that this manifest does not ask for."""
    for stage in included:
        if not stage.applies(site):
            for name in stage.writes:
                (site.folder_of(stage.name) / name).unlink(missing_ok=True)


def _lapses(included: Sequence[Stage[SiteT]], site: SiteT) -> dict[str, str]:
    """Return, for each stage that has work here, why its earlier result does not hold; empty where it does."""
    at_work = [stage for stage in included if stage.applies(site) and not stage.on_demand]
    return {stage.name: "it was asked for" if _is_asked_for(stage, site) else lapse(stage, site) for stage in at_work}


def _is_asked_for(stage: Stage[SiteT], site: SiteT) -> bool:
    return stage.name == site.options.first


def _is_needed(stage: Stage[SiteT], stages: Sequence[Stage[SiteT]], lapses: Mapping[str, str]) -> bool:
    return any(stage.name in other.needs for other in stages if lapses.get(other.name))


def _run(stage: Stage[SiteT], stages: Sequence[Stage[SiteT]], *, site: SiteT) -> None:
    """Run one stage on what it needs, and mark it as finished."""
    for need in (other for other in stages if other.name in stage.needs):
        if need.on_demand and need.name not in site.found:
            site.found[need.name] = need.run(site)
        elif need.rests_on is not None and not site.options.includes(need.name):
            require_as_left(need, site)
    key = key_of(stage, site) if stage.rests_on is not None else None
    site.found[stage.name] = stage.run(site)
    if key is not None:
        mark_finished(stage, site, key)


def _report(lapses: Mapping[str, str], included: Sequence[Stage[SiteT]], *, site: SiteT) -> None:
    """Report which earlier results do not hold, and why; where there are none, nothing is said."""
    for stage in included:
        why = lapses.get(stage.name)
        if why and not _is_asked_for(stage, site) and _has_run(stage, site):
            site.progress(f"{stage.name} runs again: {why}")


def _has_run(stage: Stage[SiteT], site: SiteT) -> bool:
    left = (site.folder_of(stage.name) / name for name in stage.writes)
    return site.kept(stage.marker).exists() or any(file.exists() for file in left)


# --- variants -----------------------------------------------------------------------------------------------


def _of_variants(sites: Sequence[VariantSite], options: Run) -> tuple[VariantOutcome, ...]:
    if not any(options.includes(stage.name) for stage in OF_VARIANT):
        return tuple(_variant_outcome(site, ()) for site in sites)
    from publisher.engines import engine_named

    with engine_named(options.engine, options.device) as engine:
        at_work = [replace(site, engine=engine) for site in sites]
        for site in at_work:
            _look_ahead(OF_VARIANT, site)
        return tuple(_variant_outcome(site, work_through(OF_VARIANT, site)) for site in at_work)


def _variant_outcome(site: VariantSite, reused: tuple[str, ...]) -> VariantOutcome:
    done = [stage.name for stage in OF_VARIANT if site.options.includes(stage.name) and not stage.on_demand]
    return VariantOutcome(
        path=site.variant.path,
        label=site.variant.label,
        reused=reused,
        summary=site.result("extract", Extraction).summary if done else None,
        validation=site.result("validate", Validation) if "validate" in done else None,
        loaders=site.result("loaders", Loaders).verdicts if "loaders" in done else (),
        verification=site.result("verify", Verification) if site.verifies else None,
    )


def _outcome(site: ReleaseSite, variants: tuple[VariantOutcome, ...]) -> Outcome:
    card, pushed = site.given("card", CardChange), site.given("push", Pushed)
    unread = PushOutcome(**pushed.model_dump(), read_back=None) if pushed else None
    return Outcome(
        manifest=str(site.options.manifest_file),
        staged=str(site.staged),
        stages=tuple(name for name in NAMES if site.options.includes(name)),
        variants=variants,
        card_changed=card.changed if card else None,
        signature=site.given("sign", Signing),
        plan=site.given("push", CommitPlan),
        push=site.given("read_back", PushOutcome) or unread,
    )
