"""`publish explain MODULE`: all that is known of one module, from the evidence alone.

A module goes by its full name or by the end of one that no other shares; a name that fits none is refused with the
nearest there are.
"""

import difflib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from publisher.errors import ManifestError, counted, listed
from publisher.records.explained import Explained
from publisher.records.extraction import ExpertTensor, Extraction, ModuleExtraction
from publisher.records.formats import significant_percent
from publisher.release.charts import floors, margin
from publisher.release.evidence import Evidence, ReleaseEvidence
from publisher.release.verdict import verdict_on

_BARS = "▁▂▃▄▅▆▇█"
_NEAREST = 6


@dataclass(frozen=True, slots=True)
class _Found:
    """A module, or one or all experts of a parameter as one, and the variant that it is in.

    Attributes:
        evidence: of the variant.
        module: the module, or what stands for it.
        tensor: the parameter of experts that it is or belongs to.
    """

    evidence: Evidence
    module: ModuleExtraction
    tensor: ExpertTensor | None = None


def explain(name: str, found: ReleaseEvidence) -> tuple[Explained, ...]:
    """Return what is known of a module, in each variant that has one of that name.

    Raises:
        ManifestError: no module goes by that name, or several do; with the nearest names.
    """
    wanted = name.removesuffix(".weight")
    every = [one for evidence in found.adapters for one in _everything(evidence)]
    matching = [one for one in every if one.module.name == wanted]
    matching = matching or [one for one in every if one.module.name.endswith(f".{wanted}")]
    names = sorted({one.module.name for one in matching})
    if len(names) != 1:
        raise _unclear(name, names or nearest(wanted, [one.module.name for one in every]), several=len(names) > 1)
    return tuple(map(_explained, matching))


def _everything(evidence: Evidence) -> Iterator[_Found]:
    yield from (_Found(evidence, module) for module in evidence.extraction.modules)
    for tensor in evidence.extraction.experts:
        yield _Found(evidence, tensor.together, tensor)
        yield from (_Found(evidence, tensor.alone(found), tensor) for found in tensor.experts)


def _unclear(name: str, names: list[str], *, several: bool) -> ManifestError:
    what = f"{counted(len(names), 'module')} end in '{name}'" if several else f"no module is called '{name}'"
    near = f"; {'they are' if several else 'the nearest are'}:\n{listed(names)}\n" if names else ""
    return ManifestError(
        f"{what}{near}",
        expected="a module's full name, or the end of one that no other shares",
        next_step="publish report lists them all",
    )


def nearest(name: str, names: list[str]) -> list[str]:
    """Return the names that contain this one, or else those whose end of as many parts is spelt most like it."""
    known, parts = list(dict.fromkeys(names)), name.count(".") + 1
    if inside := [one for one in known if name in one]:
        return inside[:_NEAREST]
    ends = {one: ".".join(one.split(".")[-parts:]) for one in known}
    close = difflib.get_close_matches(name, dict.fromkeys(ends.values()), n=_NEAREST, cutoff=0.5)
    return sorted((one for one in known if ends[one] in close), key=lambda one: close.index(ends[one]))[:_NEAREST]


# --- the facts ----------------------------------------------------------------------------------------------


def _explained(found: _Found) -> Explained:
    extraction, module = found.evidence.extraction, found.module
    experts = _experts(found.tensor) if found.tensor and found.tensor.name == module.name else ()
    facts = (
        *_figures(module),
        _bit_for_bit(found),
        *experts,
        *_recovery(module),
        *_tensors(found),
        *_files(extraction),
    )
    return Explained(module=module.name, variant=extraction.path, label=extraction.label, facts=facts, figures=module)


def _figures(module: ModuleExtraction) -> Iterator[tuple[str, str]]:
    judged = verdict_on(module)
    yield "verdict", f"{judged.level}: {judged.why}"
    order = "in x out, as stored" if module.transposed else "out x in"
    yield "shape", f"{module.shape[0]} x {module.shape[1]} ({order}), {math.prod(module.shape):,} weights"
    padded = f", padded to {module.alpha}" if module.alpha != module.rank else ""
    yield "rank", f"{module.rank} of at most {min(module.shape)}{padded}; found by {module.method}"
    error, floor = _percent(module.relative_error), _percent(module.rounding_floor)
    yield "error", f"{error} of the update, factors as shipped; {floors(module):.3g} of the floor"
    yield "floor", f"{floor}: what merge rounding leaves; {_percent(module.expected_error)} beside a fit of this rank"
    ratio = "nothing is left to compare" if module.ratio is None else f"{module.ratio:.3g} of what rounding explains"
    yield "fit", f"{_percent(module.fit_error)} before the factors were rounded; {ratio}"
    after = "none left out" if module.sigma_next is None else f"then {module.sigma_next:.4g}"
    yield "singular values", f"{module.sigma_1:.4g} to {module.sigma_r:.4g} kept, {after}"
    yield "noise edge", f"{module.noise_edge:.4g}; the smallest value kept is {margin(module):.3g} times as large"
    if module.spectrum:
        yield "spectrum", f"{spectrum_bar(module)} (logarithmic, from the noise edge up)"
    yield "update", f"rms {module.update_rms:.3g}; {_percent(module.unchanged_share)} of the weights unchanged"
    if way := module.arithmetic:
        cast = f", then cast to {way.rounded_to}" if way.merged_in != way.rounded_to else ""
        yield "merge", f"in {way.merged_in}{cast}; {way.roundings}"


def _bit_for_bit(found: _Found) -> tuple[str, str]:
    how = "merged and rounded once" if found.tensor is None else "merged with the update rounded before"
    how = "merged as the release was" if found.module.arithmetic else how
    return "bit for bit", f"{_percent(found.module.exact_share)} of the weights, {how}"


def _percent(share: float) -> str:
    return significant_percent(share, digits=4)


def spectrum_bar(module: ModuleExtraction) -> str:
    """Return one block for each value of the spectrum, as high as the value stands above the noise edge.

    The height is logarithmic, from the noise edge to the largest value.
    """
    floor, top = (math.log(max(value, 1e-30)) for value in (module.noise_edge, module.sigma_1))
    reach = max(top - floor, 1e-9)
    heights = (min(max((math.log(max(value, 1e-30)) - floor) / reach, 0), 1) for value in module.spectrum)
    return "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)


def _recovery(module: ModuleExtraction) -> Iterator[tuple[str, str]]:
    found = module.recovery
    if found is None:
        return
    sure = "" if found.told_apart else ", as far as can be told"
    yield "merged by", f"{found.arithmetic}{sure}"
    shares = f"{_percent(found.float32_share)} in float32, {_percent(found.share)} as shipped"
    ended = f"{found.ended} after {counted(found.iterations, 'iteration')}"
    yield "exact method", f"{_percent(found.svd_share)} bit for bit by the SVD, {shares}; {ended}"
    if found.residual is not None:
        yield "residual", f"{counted(found.residual, 'element')} in residual.safetensors"


def _experts(tensor: ExpertTensor) -> Iterator[tuple[str, str]]:
    """Yield what the experts of a parameter are together; the figures before are those of all of them as one."""
    yield "experts", f"{len(tensor.experts)} of {tensor.number} changed; the figures above are those of all together"
    ranks = Counter(found.rank for found in tensor.experts)
    yield "ranks", ", ".join(f"{number} at {rank}" for rank, number in sorted(ranks.items(), reverse=True))
    worst = max(tensor.experts, key=lambda found: (found.relative_error, -found.expert))
    yield "worst expert", f"{worst.expert}: {_percent(worst.relative_error)} of its update, rank {worst.rank}"


def _tensors(found: _Found) -> Iterator[tuple[str, str]]:
    module, tensor = found.module, found.tensor
    if tensor is not None:
        rows, columns = tensor.sides
        width = tensor.number * tensor.alpha
        yield "tensors", f"{tensor.keys[0]} ({width} x {columns}; the rows of one expert together)"
        yield "", f"{tensor.keys[1]} ({rows} x {width}; the expert runs fastest)"
        return
    for title, key, shape in zip(("tensors", ""), module.keys, module.factor_shapes, strict=True):
        yield title, f"{key} ({' x '.join(map(str, shape))})"


def _files(extraction: Extraction) -> Iterator[tuple[str, str]]:
    for name, file in extraction.summary.written.items():
        yield "file" if name == extraction.summary.adapter.name else "", f"{name}, SHA-256 {file.sha256}"
    for side, known in (("source", extraction.source), ("base", extraction.base)):
        yield side, f"{known.name} at {known.revision}, {counted(len(known.files), 'file')} read"


def module_names(found: ReleaseEvidence) -> list[str]:
    """Return the names of all modules, for a shell to complete."""
    return sorted({module.name for evidence in found.adapters for module in evidence.extraction.places})
