"""Whether an adapter in a folder is what its extraction.json says, as far as no weights of the base are needed.

Its files have the recorded digests, hold just the recorded modules, and PEFT puts every tensor of them into the
manifest's class, at scaling 1. PEFT itself only warns, or says nothing, where an adapter loads in part; here each of
these is an error.
"""

from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch
from safetensors import safe_open

from publisher.adapters.loading import AdapterLocation, loading_problems, quiet
from publisher.adapters.parameters import expert_shapes
from publisher.adapters.peft_files import carried_keys, token_row_keys
from publisher.errors import ValidationError, listed
from publisher.manifest.schema import Variant
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.filenames import ADAPTER
from publisher.records.files import sha256_of

_AGAIN = "publish extract --manifest MANIFEST"


def require_structure(variant: Variant, extraction: Extraction, *, base: Snapshot, staged: Path) -> None:
    """Raise unless the adapter's files are the recorded ones, and PEFT loads them whole.

    Args:
        variant: the manifest's entry.
        extraction: the adapter's extraction.json.
        base: the base, of which config.json alone is read.
        staged: the folder of the adapter.

    Raises:
        ValidationError: naming every file, tensor or module that is not as it should be.
    """
    with quiet():
        require_files(extraction, staged)
        require_loadable(variant, extraction, base=base, staged=staged)


def require_files(extraction: Extraction, staged: Path) -> None:
    """Raise unless the adapter's files are those of extraction.json, and hold just its modules.

    Raises:
        ValidationError: a file is missing or another, or its tensors are not those that are recorded.
    """
    for name, recorded in extraction.summary.written.items():
        if not (staged / name).is_file():
            raise ValidationError(f"{staged / name} does not exist", next_step=_AGAIN)
        found = sha256_of(staged / name)
        if found != recorded.sha256:
            raise ValidationError(
                f"{staged / name} has SHA-256 {found[:12]}…",
                expected=f"{recorded.sha256[:12]}…, as extraction.json says",
                next_step=_AGAIN,
            )
    require_tensors(extraction, staged)


def require_tensors(extraction: Extraction, staged: Path) -> None:
    """Raise unless the adapter holds just the modules of extraction.json: in shape and dtype, finite, not all zero.

    Raises:
        ValidationError: naming every tensor that is missing, has no module, or is not as recorded.
    """
    expected = dict[str, tuple[int, ...]]()
    for module in extraction.modules:
        expected |= zip(module.keys, module.factor_shapes, strict=True)
    expected |= {key: shape for tensor in extraction.experts for key, shape in expert_shapes(tensor).items()}
    stored = carried_keys(extraction.summary.carried).keys() | token_row_keys(extraction.summary.token_rows).keys()
    every = expected.keys() | stored
    with safe_open(staged / ADAPTER, framework="pt") as file:
        problems = [f"{key} is missing" for key in sorted(every - set(file.keys()))]
        problems += [f"{key} belongs to no module" for key in sorted(set(file.keys()) - every)]
        for key in sorted(expected.keys() & set(file.keys())):
            problems += _tensor_problems(key, file.get_tensor(key), shape=expected[key], settings=extraction)
    require_no_problems(problems, f"{staged / ADAPTER} does not hold what extraction.json lists")


def _tensor_problems(key: str, tensor: torch.Tensor, *, shape: tuple[int, ...], settings: Extraction) -> Iterator[str]:
    if tuple(tensor.shape) != shape:
        yield f"{key} is {tuple(tensor.shape)} instead of {shape}"
    if tensor.dtype != getattr(torch, settings.settings.dtype):
        yield f"{key} is {tensor.dtype} instead of {settings.settings.dtype}"
    if not bool(torch.isfinite(tensor).all()):
        yield f"{key} holds NaN or infinity"
    if not bool(tensor.any()):
        yield f"{key} is all zero"


def require_loadable(variant: Variant, extraction: Extraction, *, base: Snapshot, staged: Path) -> None:
    """Raise unless PEFT puts every tensor of the file into the manifest's class, and nothing else, at scaling 1.

    Args:
        variant: the manifest's entry, which names the class.
        extraction: the adapter's extraction.json.
        base: the base, of which config.json alone is read.
        staged: the folder of the adapter.

    Raises:
        ValidationError: naming every module that does not load as it should.
    """
    problems = loading_problems(
        variant.model_class,
        extraction.modules,
        config=base.folder,
        adapter=AdapterLocation(staged),
        experts=extraction.experts,
    )
    require_no_problems(
        problems,
        f"PEFT does not load {staged} whole on {variant.model_class}",
        next_step=f"correct model_class in the manifest if it is not the class that was saved, or: {_AGAIN}",
    )


def judging_packages() -> dict[str, str]:
    """Return the versions of the packages that decide whether an adapter loads and what it computes."""
    return {name: metadata.version(name) for name in ("peft", "torch", "transformers")}


def require_no_problems(problems: Sequence[str], what: str, *, next_step: str = _AGAIN) -> None:
    """Raise one error that lists every problem, if there is any.

    Args:
        problems: a line for each.
        what: what they speak against.
        next_step: what to do about it.

    Raises:
        ValidationError: there is a problem.
    """
    if problems:
        raise ValidationError(
            f"{what}:\n{listed(problems)}\n", expected="no difference in either direction", next_step=next_step
        )
