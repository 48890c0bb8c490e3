"""Exports: the adapter in the formats of other loaders, beside the PEFT files, where the manifest asks for them.

`gguf` for llama.cpp, `mlx` for mlx-lm. Each is made from the PEFT file, read back, and compared with it in every bit;
one that differs is refused. So is, before the long work, one that could not be right: a class whose weights' places
are not known, modules that the other loader lacks, a package that is missing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from publisher.adapters.exports.llamacpp import places
from publisher.adapters.exports.lora_gguf import gguf_problems, has_package, require_package, write_gguf
from publisher.adapters.exports.mlx import mlx_obstacles, mlx_problems, write_mlx
from publisher.adapters.exports.peft_adapter import PeftAdapter
from publisher.errors import ExtractionError, listed
from publisher.manifest.architectures import KNOWN
from publisher.records.checkpoint import FileDigest
from publisher.records.extraction import ModuleExtraction
from publisher.records.filenames import EXPORTS, GGUF

_Problems = Callable[[Path, PeftAdapter], Iterator[str]]


def require_exportable(
    exports: Sequence[str], model_class: str, *, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> None:
    """Raise an error unless these formats can hold an adapter for these modules.

    Args:
        exports: `gguf`, `mlx`.
        model_class: the manifest's.
        shapes: (out, in) of each module, by name.
        config: the base's config.json.

    Raises:
        ExtractionError: naming each module that has no place, or what is missing.
    """
    for export in exports:
        if model_class not in KNOWN[export]:
            raise _refused(export, [f"{model_class} is none of {', '.join(sorted(KNOWN[export]))}"])
        if export == "gguf":
            require_package()
            problems = places(model_class, shapes, config=config)[1]
        else:
            problems = mlx_obstacles(shapes, config=config)
        if problems:
            raise _refused(export, problems)


def _refused(export: str, problems: Iterable[str]) -> ExtractionError:
    return ExtractionError(
        f"adapter.exports has {export}, which cannot hold this adapter:\n{listed(problems)}\n",
        expected="modules that the other loader has, each at a known place",
        next_step=f"remove {export} from adapter.exports in the manifest",
    )


def write_exports(
    exports: Sequence[str],
    modules: Sequence[ModuleExtraction],
    *,
    model_class: str,
    folder: Path,
    config: Mapping[str, Any],
) -> tuple[FileDigest, ...]:
    """Write these formats, made from the adapter in `folder`; a file of a format that is not asked for goes.

    Args:
        exports: `gguf`, `mlx`.
        modules: of the adapter.
        model_class: the manifest's.
        folder: where the adapter is, and the files go.
        config: the base's config.json.

    Returns:
        The digests of the files written.

    Raises:
        ExtractionError: what was written does not read back as the adapter.
        NoRoomError: the disk is full.
    """
    for name in (name for export, names in EXPORTS.items() if export not in exports for name in names):
        (folder / name).unlink(missing_ok=True)
    if not exports:
        return ()
    adapter = peft_adapter(model_class, modules, folder=folder, config=config)
    for export in exports:
        _WRITERS[export](folder, adapter)
        if problems := list(_PROBLEMS[export](folder, adapter)):
            raise _differs(export, problems)
    return tuple(FileDigest.of(folder / name, name=name) for export in exports for name in EXPORTS[export])


def _differs(export: str, problems: Iterable[str]) -> ExtractionError:
    return ExtractionError(
        f"the {export} export does not read back as the adapter it was made from:\n{listed(problems)}\n",
        expected="the same B A in every module, at a scale of 1",
        next_step=f"remove {export} from adapter.exports in the manifest, and report this with the lines above",
    )


def peft_adapter(
    model_class: str, modules: Sequence[ModuleExtraction], *, folder: Path, config: Mapping[str, Any]
) -> PeftAdapter:
    """Read the PEFT adapter in this folder, as its exports have it.

    Args:
        model_class: the manifest's.
        modules: of the adapter.
        folder: where its files are.
        config: the base's config.json.

    Returns:
        The adapter.

    Raises:
        FetchError: its file is missing or damaged.
    """
    names, rank = tuple(module.name for module in modules), max(module.alpha for module in modules)
    return PeftAdapter.read(folder, model_class, modules=names, rank=rank, config=config)


def missing_package(exports: Iterable[str]) -> str:
    """Return the package that reading these formats takes and that is not installed; empty where none is lacking."""
    return "gguf" if "gguf" in exports and not has_package() else ""


def export_problems(exports: Iterable[str], folder: Path, *, adapter: PeftAdapter) -> list[str]:
    """Return what of the written formats is not the adapter.

    Args:
        exports: `gguf`, `mlx`.
        folder: with the formats.
        adapter: the PEFT adapter that they were made from.

    Returns:
        A line for each problem, which begins with the format.
    """
    return [f"{export}: {line}" for export in exports for line in _PROBLEMS[export](folder, adapter)]


def _at(name: str, problems: _Problems) -> _Problems:
    return lambda folder, adapter: problems(folder / name, adapter)


_WRITERS: Mapping[str, Callable[[Path, PeftAdapter], None]] = {
    "gguf": lambda folder, adapter: write_gguf(folder / GGUF, adapter),
    "mlx": write_mlx,
}
_PROBLEMS: Mapping[str, _Problems] = {"gguf": _at(GGUF, gguf_problems), "mlx": mlx_problems}
