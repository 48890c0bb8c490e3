"""`publish compat`: the verdicts on staged adapters, or on any PEFT adapter in a folder, and a sound copy of one.

Nothing is written but that copy, with `--repair`. It refuses a command line that names neither or both, and a staged
tree without an adapter. For a folder that comes without its base, only config.json of the base that adapter_config.json
names is fetched. Begin with `judged`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from publisher.adapters.base_config import base_config
from publisher.checkpoints.files import MODEL_CONFIG, read_config, read_json
from publisher.errors import FetchError, ManifestError
from publisher.hub import client as hub
from publisher.loaders import judge
from publisher.loaders.repairing import write_repaired
from publisher.loaders.subject import Base, Subject, class_for, read_subject
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Variant
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG
from publisher.records.loaders import Judged, LoaderName, Repaired
from publisher.records.progress import Progress


@dataclass(frozen=True, slots=True)
class Beside:
    """The checkpoints that are at hand beside the adapter in a folder.

    Attributes:
        base: where the base's config.json is; the base that the adapter names where none is given.
        source: the merged fine-tune, by which the packing of experts is told; `base` then has its weights too.
    """

    base: Path | None = None
    source: Path | None = None


_NOTHING = Beside()


def judged(
    *,
    adapter: Path | None,
    manifest: Path | None,
    variants: Sequence[str],
    dist: Path,
    beside: Beside = _NOTHING,
    required: tuple[str, ...],
    progress: Progress,
) -> Judged:
    """Return the verdicts of every loader on the staged adapters of a manifest, or on the adapter in a folder.

    Args:
        adapter: a folder with a PEFT adapter; or none.
        manifest: the manifest whose staged adapters are judged, instead.
        variants: paths of the variants to judge; empty for all.
        dist: where the staged tree is.
        beside: for a folder: what is at hand of its checkpoints.
        required: names of loaders that must take every adapter, besides PEFT.
        progress: told of each adapter.

    Returns:
        The verdicts, by the variant's label or the folder.

    Raises:
        ManifestError: neither or both of folder and manifest are given, the manifest has no such variant, or no
            loader of a required name is known.
        FetchError: there is no adapter, or no config.json of the base.
        ValidationError: transformers has no class for the base.
        HubError: the Hub cannot be reached for the base's config.json.
    """
    if (adapter is None) == (manifest is None):
        raise ManifestError("give an adapter's folder or --manifest M, one of the two")
    _require_known(required)
    _require_base(beside, manifest)
    subjects = _staged(manifest, variants, dist=dist) if manifest else {}
    if adapter is not None:
        subjects[str(adapter)] = read_subject(adapter, _base_of(adapter, beside), source=beside.source)
    found = {}
    for label, subject in subjects.items():
        progress(f"trying loaders on {label}")
        found[label] = judge(subject)
    return Judged(found, required)


def repaired(
    adapter: Path | None,
    out: Path,
    *,
    manifest: Path | None,
    beside: Beside,
    required: tuple[str, ...],
    progress: Progress,
) -> Repaired:
    """Write a sound copy of the adapter in a folder, and judge it.

    Args:
        adapter: a folder with a PEFT adapter.
        out: the folder to write, which does not exist yet or is empty.
        manifest: none: what a manifest stages is extracted again, not repaired.
        beside: what is at hand of its checkpoints.
        required: names of loaders that must take what is written, besides PEFT.
        progress: told of each piece of work.

    Returns:
        What was changed, and the verdicts on what was written.

    Raises:
        ManifestError: there is no folder of an adapter, or `out` cannot be taken, or no such loader is known.
        FetchError: a file is missing or damaged.
        ValidationError: nothing can be repaired without guessing.
        HubError: the Hub cannot be reached for the base's config.json.
    """
    if adapter is None or manifest is not None:
        raise ManifestError(
            "--repair is for the adapter in a folder", next_step="publish compat ADAPTER --base DIR --repair OUT"
        )
    _require_known(required)
    _require_base(beside, manifest)
    base = _base_of(adapter, beside)
    changes, verdicts = write_repaired(adapter, base, out=out, source=beside.source, progress=progress)
    named = read_json(out / ADAPTER_CONFIG).get("base_model_name_or_path")
    left = () if isinstance(named, str) and named else (_UNNAMED,)
    return Repaired(str(out), changes, left, Judged({str(out): verdicts}, required))


_UNNAMED = "adapter_config.json names no base: write its repository's id into base_model_name_or_path"


def _require_known(required: Sequence[str]) -> None:
    known = get_args(LoaderName)
    strange = [name for name in required if name not in known]
    if strange:
        raise ManifestError(f"--require {strange[0]}: no such loader", expected=f"one of {', '.join(known)}")


def _require_base(beside: Beside, manifest: Path | None) -> None:
    if beside.source is not None and (beside.base is None or manifest is not None):
        raise ManifestError(
            "--source is for the adapter in a folder, and is compared with the weights of its base",
            next_step="publish compat ADAPTER --base DIR --source DIR",
        )
    if beside.source is not None and not beside.source.is_dir():
        raise ManifestError(f"--source: there is no folder {beside.source}", expected="the merged fine-tune's folder")


def _staged(manifest: Path, paths: Sequence[str], *, dist: Path) -> dict[str, Subject]:
    every = load_manifest(manifest).variants
    wanted = {path if path.endswith("/") else f"{path}/" for path in paths}
    if unknown := wanted - {variant.path for variant in every}:
        raise ManifestError(f"the manifest has no variant at {', '.join(sorted(unknown))}")
    chosen = [variant for variant in every if variant.path in wanted or not wanted]
    return {variant.label: _of_variant(variant, dist / manifest.stem, manifest) for variant in chosen}


def _of_variant(variant: Variant, staged: Path, manifest: Path) -> Subject:
    folder = staged / variant.folder
    if not (folder / ADAPTER).is_file():
        raise FetchError(f"{folder} holds no adapter", next_step=f"publish extract --manifest {manifest}")
    return read_subject(folder, Base(base_config(variant), variant.model_class), subfolder=variant.folder)


def _base_of(folder: Path, beside: Beside) -> Base:
    config = read_json(folder / ADAPTER_CONFIG)
    place = beside.base or _named_base(config.get("base_model_name_or_path"), config.get("revision"))
    return Base(place, class_for(config, read_config(place)))


def _named_base(name: object, revision: object) -> Path:
    if not isinstance(name, str) or not name:
        raise FetchError("adapter_config.json names no base", next_step="name the base's folder with --base")
    if Path(name).is_dir():
        return Path(name)
    pin = revision if isinstance(revision, str) and revision else hub.resolve_revision(name, "main")
    return hub.download(name, pin, filename=MODEL_CONFIG).parent
