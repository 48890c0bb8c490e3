"""One adapter against its evidence: extraction.json, the manifest, and the base's configuration.

What extraction.json says is held against the files, against itself, and against what the Hub lists at the pins; the
checkpoints' weights are not needed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from publisher.adapters.exports import export_problems, missing_package, peft_adapter
from publisher.adapters.loading import quiet
from publisher.adapters.parameters import unpacked
from publisher.adapters.peft_files import adapter_config
from publisher.adapters.structure_checks import require_loadable, require_tensors
from publisher.audits.adapter import Adapter
from publisher.audits.chart_meaning import chart_problems
from publisher.audits.checks import UncheckedError, adapted_places, checked, needed, require_none
from publisher.audits.meaning import other_renderer
from publisher.audits.versions import read_or_newer, require_as_written
from publisher.border.files import read_text
from publisher.border.limits import LIMITS
from publisher.checkpoints.files import MODEL_CONFIG, read_json
from publisher.checkpoints.reading import TensorReader
from publisher.errors import AuditError, MissingRevisionError, PublisherError, counted, listed, shown
from publisher.extraction.matrices import matrices, widest_rank
from publisher.extraction.summary import summary_problems
from publisher.hub import client as hub
from publisher.loaders import on_peft
from publisher.loaders.subject import Base, read_subject
from publisher.manifest.schema import Variant
from publisher.numerics.noise import expected_error
from publisher.records.audit import Check
from publisher.records.checkpoint import Checkpoint, Snapshot
from publisher.records.extraction import ExpertTensor, Extraction, MatrixFigures, ModuleExtraction, spectrum_places
from publisher.records.filenames import (
    ADAPTER,
    ADAPTER_CONFIG,
    CARD,
    CHARTS,
    EXTRACTION,
    LOADERS,
    MANIFEST,
    VERIFICATION,
)
from publisher.records.files import digest_of, sha256_of
from publisher.records.loaders import Loaders
from publisher.records.verification import Verification
from publisher.release.charts import card_charts
from publisher.release.evidence import load_verification, require_recipe
from publisher.verification.metrics import inconsistencies

_ROUNDED = 1e-5  # of a figure that follows from others: each of them is rounded to six digits
_SPECTRUM = 0.02  # of a singular value: the factors are rounded to their dtype


def evidence_checks(adapter: Adapter) -> Iterator[Check]:
    """Yield the checks that need extraction.json, the manifest or the base's config.json."""
    claims: dict[str, Callable[[Adapter], str]] = {
        "evidence": evidence,
        "recipe": recipe,
        "digests": digests,
        "recorded config": recorded_config,
        "recorded tensors": recorded_tensors,
        "figures": figures,
        "singular values": singular_values,
        "loaders": loaders,
        "verification": verification,
        "charts": charts,
        "source": partial(checkpoint, side="source"),
        "base": partial(checkpoint, side="base"),
        "loading": loading,
    }
    if adapter.extraction is not None and adapter.extraction.settings.exports:
        claims["exports"] = exported
    for name, claim in claims.items():
        yield checked(name, partial(claim, adapter), folder=adapter.folder, variant=adapter.path)


def _recorded(adapter: Adapter) -> Extraction:
    return needed(adapter.extraction, EXTRACTION)


def evidence(adapter: Adapter) -> str:
    """Check that extraction.json is one, for this path, in the very form in which this tool writes it.

    An older one may lack fields that were added later.
    """
    file = adapter.folder / EXTRACTION
    if not file.is_file() and adapter.variant is None:
        raise UncheckedError(f"there is no {EXTRACTION}")
    found = read_or_newer(file, Extraction.read)
    older = require_as_written(file, found)
    if found.path != adapter.path:
        raise AuditError(f"{EXTRACTION} is that of the variant {found.path}")
    return f"{adapted_places(found)}, by publisher {found.tools.publisher}{older}"


def recipe(adapter: Adapter) -> str:
    """Check that extraction.json has the manifest's checkpoints and settings."""
    extraction, variant = _recorded(adapter), needed(adapter.variant, MANIFEST)
    require_recipe(extraction, variant, file=adapter.folder / EXTRACTION)
    return "checkpoints and settings are the manifest's"


def digests(adapter: Adapter) -> str:
    """Check that weights and configuration are the bytes that extraction.json records."""
    summary = _recorded(adapter).summary
    problems = []
    for name, recorded in summary.written.items():
        path = adapter.folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (found := sha256_of(path)) != recorded.sha256 or recorded.name != name:
            problems.append(f"{name} has SHA-256 {found[:12]}…; {EXTRACTION} says {recorded.sha256[:12]}…")
        elif path.stat().st_size != recorded.size:
            problems.append(f"{name} has {path.stat().st_size} bytes; {EXTRACTION} says {recorded.size}")
    require_none(problems)
    return f"{ADAPTER} {summary.adapter.sha256[:12]}…, {ADAPTER_CONFIG} {summary.config.sha256[:12]}…"


# --- config and tensors as recorded -------------------------------------------------------------------------


def recorded_config(adapter: Adapter) -> str:
    """Check that adapter_config.json is what manifest and modules give, field for field."""
    found, extraction = needed(adapter.config, ADAPTER_CONFIG), _recorded(adapter)
    variant, modules, experts = needed(adapter.variant, MANIFEST), extraction.modules, extraction.experts
    needed(matrices(modules, experts) or None, "module in it")
    base = _pinned(variant, extraction.base)
    expected = adapter_config(
        modules,
        task_type=variant.adapter.task_type,
        rank=widest_rank(modules, experts),
        base=base,
        carried=extraction.summary.carried,
        token_rows=extraction.summary.token_rows,
        experts=experts,
    )
    fields = sorted(found.keys() | expected.keys())
    require_none([_difference(f, found, expected) for f in fields if found.get(f, ...) != expected.get(f, ...)])
    return f"{len(fields)} fields, as manifest and modules give them"


def _pinned(variant: Variant, recorded: Checkpoint) -> Checkpoint:
    if variant.base.repo is None or variant.base.revision is None:
        return recorded
    return Checkpoint(kind="hub", name=variant.base.repo, revision=variant.base.revision, files=recorded.files)


def _difference(field: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    if field not in found or field not in expected:
        return (
            f"{field} is missing" if field not in found else f"{field} is {shown(found[field])}; expected no such field"
        )
    there, wanted = found[field], expected[field]
    if isinstance(there, list) and isinstance(wanted, list):
        lost, more = ([x for x in one if x not in other] for one, other in ((wanted, there), (there, wanted)))
        return (
            f"{field} lacks {shown(lost)}, has {shown(more)} that it should not" if lost or more else f"{field}: order"
        )
    if isinstance(there, dict) and isinstance(wanted, dict):
        other = sorted(key for key in there.keys() | wanted.keys() if there.get(key) != wanted.get(key))
        values = f"{shown(there.get(other[0]))}; expected {shown(wanted.get(other[0]))}"
        return f"{field}: {len(other)} entries differ, the first {other[0]}: {values}"
    return f"{field} is {shown(there)}; expected {shown(wanted)}"


def recorded_tensors(adapter: Adapter) -> str:
    """Check that the file holds just the modules of extraction.json, in their shapes and dtype."""
    extraction = _recorded(adapter)
    needed(adapter.headers, ADAPTER)
    require_tensors(extraction, adapter.folder)
    tensors = 2 * (len(extraction.modules) + len(extraction.experts))
    return f"{tensors} tensors of {adapted_places(extraction)} in {extraction.settings.dtype}"


# --- figures ------------------------------------------------------------------------------------------------


def figures(adapter: Adapter) -> str:
    """Check that the summary follows from the modules, and the modules' derived figures from their own."""
    extraction = _recorded(adapter)
    modules = extraction.modules
    if not matrices(modules, extraction.experts):
        raise AuditError(f"{EXTRACTION} lists no module")
    problems = [*summary_problems(extraction), *(line for m in modules for line in _inconsistent(m))]
    problems += [line for tensor in extraction.experts for line in _inconsistent_experts(tensor)]
    require_none(problems)
    return f"the summary follows from its {adapted_places(extraction)}"


def _inconsistent_experts(tensor: ExpertTensor) -> Iterator[str]:
    if tensor.alpha < tensor.rank:
        yield f"{tensor.name}: alpha is {tensor.alpha}; an expert has rank {tensor.rank}"
    for found in tensor.experts:
        yield from _inconsistent_matrix(f"{tensor.name}[{found.expert}]", found, shape=tensor.matrix)


def _inconsistent_matrix(name: str, found: MatrixFigures, *, shape: tuple[int, int]) -> Iterator[str]:
    if found.rank > min(shape):  # what follows would be the root of a negative number
        yield f"{name}: rank is {found.rank}; its shape is {shown(shape)}"
        return
    expected = expected_error(found.rounding_floor, shape=shape, rank=found.rank)
    if not math.isclose(found.expected_error, expected, rel_tol=_ROUNDED):
        yield f"{name}: expected_error is {found.expected_error}; it comes out as {expected:.6g}"
    ratio = found.fit_error / found.expected_error if found.expected_error else None
    if (ratio is None) != (found.ratio is None) or not math.isclose(found.ratio or 0, ratio or 0, rel_tol=_ROUNDED):
        yield f"{name}: ratio is {found.ratio}; it comes out as {ratio and f'{ratio:.6g}'}"


def _inconsistent(module: ModuleExtraction) -> Iterator[str]:
    yield from _inconsistent_matrix(module.name, module, shape=module.shape)
    values = module.spectrum
    expected_ends = (len(spectrum_places(module.rank)), module.sigma_1, module.sigma_r)
    if values and (len(values), values[0], values[-1]) != expected_ends:
        yield f"{module.name}: spectrum is {shown(values)}; it does not go from sigma_1 to sigma_r"
    if any(before < after for before, after in pairwise(values)):
        yield f"{module.name}: spectrum is {shown(values)}; it rises"


def singular_values(adapter: Adapter) -> str:
    """Check that sigma_1 and sigma_r stand in the factors.

    B = U sqrt(S), so the squared norm of a column of B is its singular value.

    The method `exact` moves the factors within what rounding left open: there a value may differ by the noise edge.
    """
    extraction, pairs = _recorded(adapter), adapter.pairs()
    here = [module for module in extraction.modules if module.name in pairs and module.rank]
    problems = list[str]()
    with TensorReader(needed(adapter.headers, ADAPTER)) as reader:
        for module in here:
            b = reader.read(module.keys[1]).flatten(1).double()
            sigma = b.square().sum(dim=0)[: module.rank]
            open_to = module.noise_edge if module.recovery else 0.0
            for field, found in (("sigma_1", float(sigma.max())), ("sigma_r", float(sigma.min()))):
                claimed = getattr(module, field)
                if not math.isclose(claimed, found, rel_tol=_SPECTRUM, abs_tol=open_to):
                    problems.append(f"{module.name}: {field} is {claimed:.6g}; the factors have {found:.6g}")
        there = [tensor for tensor in extraction.experts if set(tensor.keys) <= needed(adapter.headers, ADAPTER).keys()]
        problems += [line for tensor in there for line in _other_singular_values(tensor, reader)]
    require_none(problems)
    experts = f" and {counted(len(there), 'parameter')} of experts" if there else ""
    return f"those of {len(here)} modules{experts} stand in the factors"


def _other_singular_values(tensor: ExpertTensor, reader: TensorReader) -> Iterator[str]:
    """Yield the experts whose singular values are not those of their factors."""
    a, b = map(reader.read, tensor.keys)
    left, _ = unpacked(tensor, a=a, b=b)
    for found in (found for found in tensor.experts if found.rank):
        sigma = left[found.expert].double().square().sum(dim=0)[: found.rank]
        open_to = found.noise_edge if found.recovery else 0.0
        for field, value in (("sigma_1", float(sigma.max())), ("sigma_r", float(sigma.min()))):
            claimed = getattr(found, field)
            if not math.isclose(claimed, value, rel_tol=_SPECTRUM, abs_tol=open_to):
                yield f"{tensor.name}[{found.expert}]: {field} is {claimed:.6g}; the factors have {value:.6g}"


def loaders(adapter: Adapter) -> str:
    """Check that loaders.json is of these very weights and this very configuration; an older release has none."""
    file = adapter.folder / LOADERS
    if not file.is_file():
        told = ": the verdicts stand in extraction.json" if adapter.extraction and adapter.extraction.loaders else ""
        raise UncheckedError(f"there is no {LOADERS}{told}")
    found = read_or_newer(file, Loaders.read)
    older = require_as_written(file, found)
    if found.path != adapter.path:
        raise AuditError(f"{LOADERS} is that of the variant {found.path}")
    judged = {ADAPTER: found.adapter_sha256, ADAPTER_CONFIG: found.config_sha256}
    others = [name for name, digest in judged.items() if _is_other(adapter.folder / name, digest)]
    require_none([f"{LOADERS} is of another {name}" for name in others])
    return f"{len(found.verdicts)} loaders, judged on these weights and this configuration{older}"


def _is_other(file: Path, digest: str) -> bool:
    return not file.is_file() or sha256_of(file) != digest


def verification(adapter: Adapter) -> str:
    """Check that verification.json is of these weights, is what the manifest asks for, and keeps to its bounds."""
    file, variant = adapter.folder / VERIFICATION, needed(adapter.variant, MANIFEST)
    if not file.is_file():
        if variant.verification is not None:
            raise AuditError(f"there is no {VERIFICATION}, and the manifest asks for one")
        raise UncheckedError(f"there is no {VERIFICATION}, and the manifest asks for none")
    found = read_or_newer(file, partial(_verification, variant, _recorded(adapter)))
    weights = sha256_of(adapter.folder / ADAPTER) if adapter.headers is not None else ""
    if found is None or found.adapter_sha256 != weights:
        raise AuditError(f"{VERIFICATION} is of another adapter than the one here ({weights[:12]}…)")
    older = require_as_written(file, found)
    sets = (*found.sets, *(found.fp8.sets if found.fp8 else ()))
    require_none([line for one in sets for line in inconsistencies(one)])
    return f"{len(sets)} test sets, of these weights; their figures follow from each other{older}"


def _verification(variant: Variant, extraction: Extraction, file: Path) -> Verification | None:
    return load_verification(variant, extraction, file=file)


def charts(adapter: Adapter) -> str:
    """Check that the card's charts are what extraction.json gives, byte for byte.

    Raises:
        UncheckedError: another version drew them, and their numbers are those of this version's.
    """
    wanted = card_charts(_recorded(adapter))
    there = {name: adapter.folder / name for name in CHARTS if (adapter.folder / name).is_file()}
    if not there:
        raise UncheckedError(f"there is none of {', '.join(CHARTS)}")
    other = {name: path for name, path in there.items() if not _is_drawn(path, wanted.get(name))}
    lost = [name for name in wanted if name not in there]
    drawn_by = _other_renderer(adapter) if other or lost else ""
    if not drawn_by:
        require_none(
            [f"{name} is missing" for name in lost] + [f"{name} is not what {EXTRACTION} gives" for name in other]
        )
        return f"byte for byte what {EXTRACTION} gives: {', '.join(there)}"
    require_none([f"{name}: {line}" for name, path in other.items() for line in _amiss(path, wanted.get(name))])
    raise UncheckedError(
        f"drawn by {drawn_by}: the numbers on {', '.join(other) or 'none'} follow from {EXTRACTION}; where marks stand "
        f"was not compared{f'; missing: {listed(lost)}' if lost else ''}"
    )


def _is_drawn(path: Path, wanted: str | None) -> bool:
    """Return whether the file holds just this text; no more than a chart's size is read."""
    return wanted is not None and path.stat().st_size == len(wanted.encode()) and path.read_bytes() == wanted.encode()


def _amiss(path: Path, wanted: str | None) -> list[str]:
    if wanted is None:
        return [f"{EXTRACTION} gives no such chart"]
    if path.stat().st_size > LIMITS.text_bytes:
        return [f"it has {path.stat().st_size} bytes; expected at most {LIMITS.text_bytes}"]
    return chart_problems(read_text(path), wanted)


def _other_renderer(adapter: Adapter) -> str:
    """Return who rendered the release's card where it was another version; the answer is empty for this one."""
    folder = adapter.variant.folder if adapter.variant is not None else ""
    return other_renderer(
        (adapter.folder.parent if folder else adapter.folder) / CARD, {_recorded(adapter).tools.publisher}
    )


# --- the checkpoints, without their weights -----------------------------------------------------------------


def checkpoint(adapter: Adapter, *, side: str) -> str:
    """Check that the digests in extraction.json of a checkpoint's files are those that the Hub lists at the pin."""
    recorded: Checkpoint = getattr(_recorded(adapter), side)
    if recorded.kind == "local":
        if recorded.revision != digest_of([file.model_dump() for file in recorded.files]):
            raise AuditError(f"the revision of {side} in {EXTRACTION} is not the digest of its files")
        raise UncheckedError(f"{recorded.name} is a local folder, known by its files' digests alone; --deep reads it")
    try:
        there = {file.path: file for file in hub.list_files(recorded.name, recorded.revision)}
    except MissingRevisionError as error:
        raise AuditError(error.found) from None
    problems = []
    for file in recorded.files:
        remote = there.get(file.name)
        if remote is None:
            problems.append(f"{file.name} is not in {recorded.short}")
        elif remote.size != file.size or remote.sha256 not in {None, file.sha256}:
            problems.append(f"{file.name}: the Hub lists another file at {recorded.short}")
    require_none(problems)
    return f"{len(recorded.files)} files, as the Hub lists them at {recorded.name}@{recorded.revision}"


def loading(adapter: Adapter) -> str:
    """Check that PEFT puts every tensor into the model class that the base's config.json describes, and no other."""
    if adapter.config is None or adapter.headers is None:
        raise UncheckedError(f"there is no readable {ADAPTER_CONFIG} and {ADAPTER}")
    base = _base_folder(adapter)
    claim = _loads_strictly if adapter.variant is not None and adapter.extraction is not None else _loads
    with quiet():
        return claim(adapter, base)


def exported(adapter: Adapter) -> str:
    """Check that the files for other loaders, read as those do, are the PEFT adapter in every bit, at a scale of 1."""
    extraction, variant = _recorded(adapter), needed(adapter.variant, MANIFEST)
    exports, config = extraction.settings.exports, read_json(_base_folder(adapter) / MODEL_CONFIG)
    if lacking := missing_package(exports):
        raise UncheckedError(f"the package {lacking} is not installed")
    peft = peft_adapter(variant.model_class, extraction.modules, folder=adapter.folder, config=config)
    require_none(export_problems(exports, adapter.folder, adapter=peft))
    return f"{', '.join(exports)}: the same B A in {len(extraction.modules)} modules, at scale 1"


def _loads_strictly(adapter: Adapter, base: Path) -> str:
    extraction, variant = _recorded(adapter), needed(adapter.variant, MANIFEST)
    if not hasattr(transformers, variant.model_class):
        raise UncheckedError(f"transformers {transformers.__version__} has no class {variant.model_class}")
    snapshot = Snapshot(checkpoint=extraction.base, folder=base)
    require_loadable(variant, extraction, base=snapshot, staged=adapter.folder)
    return f"PEFT loads {adapted_places(extraction)} whole on {variant.model_class}, at scale 1"


def _loads(adapter: Adapter, base: Path) -> str:
    troubles = []
    for name in _classes(adapter, read_json(base / MODEL_CONFIG)):
        try:
            subject = read_subject(adapter.folder, Base(base, name))
            seen = on_peft.tried(subject)
        except PublisherError as error:
            troubles.append(f"on {name}:\n{listed([error.found])}")
            continue
        if seen.unchecked:
            raise UncheckedError(seen.unchecked)
        if not seen.findings:
            wrapped = len(subject.wrapped)
            parameters = f" and {counted(wrapped, 'parameter')}" if wrapped else ""
            told = f"PEFT loads {len(subject.factors) - wrapped} modules{parameters} whole on {name}"
            return "; ".join([told, *seen.notes])
        troubles.append(f"on {name}:\n{listed([one.what for one in seen.findings])}")
    if not troubles:
        raise UncheckedError(f"transformers {transformers.__version__} has no class that the base's config names")
    raise AuditError("PEFT does not load it as it is meant " + "\n".join(troubles))


def _classes(adapter: Adapter, base: Mapping[str, Any]) -> list[str]:
    """Return the classes that an adapter without a manifest may be for, the likeliest first."""
    found = adapter.config or {}
    names = [(found.get("auto_mapping") or {}).get("base_model_class")]
    if found.get("task_type") == "CAUSAL_LM":
        names.append(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(base.get("model_type")))
    names += base.get("architectures") or []
    return [name for name in dict.fromkeys(names) if isinstance(name, str) and hasattr(transformers, name)]


def _base_folder(adapter: Adapter) -> Path:
    """Return a folder with the base's config.json, which is the recorded one where one is recorded."""
    config = needed(adapter.config, ADAPTER_CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if adapter.variant is not None:
        name, revision = adapter.variant.base.where, adapter.variant.base.revision
    if not isinstance(name, str) or not name:
        raise UncheckedError(f"{ADAPTER_CONFIG} names no base")
    if Path(name).is_dir() and revision is None:
        folder = Path(name)
    elif adapter.variant is not None and adapter.variant.base.path is not None:
        raise UncheckedError(f"the base is a local folder, {name}, which is not here")
    else:
        pin = revision if revision and isinstance(revision, str) else hub.resolve_revision(name, "main")
        folder = hub.download(name, pin, filename=MODEL_CONFIG).parent
    _require_recorded(folder, adapter.extraction)
    return folder


def _require_recorded(folder: Path, extraction: Extraction | None) -> None:
    files = extraction.base.files if extraction is not None else ()
    recorded = next((file.sha256 for file in files if file.name == MODEL_CONFIG), None)
    try:
        found = sha256_of(folder / MODEL_CONFIG)
    except FileNotFoundError:
        raise UncheckedError(f"the base has no {MODEL_CONFIG}") from None
    if recorded is not None and found != recorded:
        raise AuditError(f"the base's {MODEL_CONFIG} has SHA-256 {found[:12]}…; {EXTRACTION} says {recorded[:12]}…")
