"""`publish compat`: the verdicts on staged adapters, or on any PEFT adapter in a folder; nothing is written.

It refuses a command line that names neither or both, and a staged tree without an adapter. For a folder that comes
without its base, only config.json of the base that adapter_config.json names is fetched. Begin with `judged`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from publisher.adapters.base_config import base_config
from publisher.checkpoints.files import MODEL_CONFIG, read_config, read_json
from publisher.errors import FetchError, ManifestError
from publisher.hub import client as hub
from publisher.loaders import judge
from publisher.loaders.subject import Base, Subject, class_for, read_subject
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Variant
from publisher.records.filenames import ADAPTER
from publisher.records.loaders import Judged, LoaderName
from publisher.records.progress import Progress


def judged(
    *,
    adapter: Path | None,
    manifest: Path | None,
    variants: Sequence[str],
    dist: Path,
    base: Path | None,
    required: tuple[str, ...],
    progress: Progress,
) -> Judged:
    """Return the verdicts of every loader on the staged adapters of a manifest, or on the adapter in a folder.

    Args:
        adapter: a folder with a PEFT adapter; or none.
        manifest: the manifest whose staged adapters are judged, instead.
        variants: paths of the variants to judge; empty for all.
        dist: where the staged tree is.
        base: for a folder: where the base's config.json is; the base that the adapter names where none is given.
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
    known = get_args(LoaderName)
    strange = [name for name in required if name not in known]
    if strange:
        raise ManifestError(f"--require {strange[0]}: no such loader", expected=f"one of {', '.join(known)}")
    subjects = _staged(manifest, variants, dist=dist) if manifest else {}
    if adapter is not None:
        subjects[str(adapter)] = _in_folder(adapter, base)
    found = {}
    for label, subject in subjects.items():
        progress(f"trying loaders on {label}")
        found[label] = judge(subject)
    return Judged(found, required)


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


def _in_folder(folder: Path, base: Path | None) -> Subject:
    from publisher.records.filenames import ADAPTER_CONFIG

    config = read_json(folder / ADAPTER_CONFIG)
    place = base or _named_base(config.get("base_model_name_or_path"), config.get("revision"))
    return read_subject(folder, Base(place, class_for(config, read_config(place))))


def _named_base(name: object, revision: object) -> Path:
    if not isinstance(name, str) or not name:
        raise FetchError("adapter_config.json names no base", next_step="name the base's folder with --base")
    if Path(name).is_dir():
        return Path(name)
    pin = revision if isinstance(revision, str) and revision else hub.resolve_revision(name, "main")
    return hub.download(name, pin, filename=MODEL_CONFIG).parent
