"""vLLM: rules read in its source; its own reader of adapter_config.json is run where vLLM is installed.

It takes each module's scale and rank by PEFT's rules, patterns included, and casts the factors to the model's dtype.
A name whose last part no layer of the model has is refused; a full name that no layer has is dropped without a word.

Where the rules stand, under `vllm/` in the wheel of the version in `READ`: `lora/peft_helper.py` for the fields and the
scale, `MaxLoRARanks` of `config/lora.py` for the ranks, `parse_fine_tuned_lora_name` and `is_base_embedding_weights` of
`lora/utils.py` for the names, `LoRAModel.from_local_checkpoint` of `lora/lora_model.py` for names that no layer has,
and `plugins/lora_resolvers/hf_hub_resolver.py` for subfolders. Which classes take LoRA is in `vllm_models`, which a
script writes. To renew them, read these again in a newer wheel, write its version into `READ`, let
`python -m tests.make_vllm_models` write the classes, and run tests/loaders.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from publisher.errors import counted
from publisher.loaders.finding import (
    MERGED,
    UNIFORM,
    changes_nothing,
    finding,
    missing_factors,
    other_base,
    repeated_factors,
    verdict,
    wrong_scales,
)
from publisher.loaders.installed import reader
from publisher.loaders.subject import Subject
from publisher.loaders.vllm_models import WITH_LORA, WITHOUT_LORA
from publisher.records.loaders import Basis, FindingKind, LoaderFinding, LoaderVerdict

READ = "0.33.0"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank takes
_DEFAULT_RANK = 16
_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # those that leave the base's weights as they are
_WHOLE = ("classifier", "score")
_REQUIRED = ("r", "lora_alpha", "target_modules")
_REFUSED = ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora")
_STRIPPED = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")  # these take the names of the whole model as well
_TOWERS = ("model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "model.multi_modal_projector.")
_RESOLVER = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, VLLM_PLUGINS=lora_hf_hub_resolver and VLLM_LORA_RESOLVER_HF_REPO_LIST=REPO"
)
_EMBEDDINGS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class _Reader:
    """What reads adapter_config.json: vLLM's own class, or the rules read in it."""

    version: str
    basis: Basis
    refusals: Callable[[Subject], list[LoaderFinding]]
    scale: Callable[[Subject, str], float]


def judge(subject: Subject) -> LoaderVerdict:
    """Return the verdict on vLLM."""
    reader = _installed() or _Reader(READ, "read", refusals, lambda adapter, name: adapter.scale_by_peft(name))
    found = [
        *reader.refusals(subject),
        *_architecture(subject),
        *_tensors(subject),
        *missing_factors(subject),
        *repeated_factors(subject),
    ]
    found += changes_nothing(subject)
    if not found:
        found += [*_silent(subject), *other_base(subject, by="vLLM")]
    why = "vLLM scales by what it reads in adapter_config.json"
    found += wrong_scales(subject, lambda name: reader.scale(subject, name), why=why, remedy=UNIFORM)
    unread = subject.base.architecture not in WITH_LORA | WITHOUT_LORA
    unknown = f"vLLM {READ} has no class {subject.base.architecture}" if unread else ""
    return verdict(
        "vLLM",
        reader.version,
        basis=reader.basis,
        findings=found,
        flags=_flags(subject),
        notes=tuple(_notes(subject)),
        unknown=unknown,
    )


def max_lora_rank(rank: int) -> int | None:
    """Return the smallest value of --max-lora-rank that lets this rank in; None where there is none."""
    return next((value for value in RANKS if value >= rank), None)


# --- adapter_config.json ------------------------------------------------------------------------------------


def refusals(subject: Subject) -> list[LoaderFinding]:
    """Return the fields that it refuses, by the rules read."""
    return [finding("refused field", what) for what in _fields(subject.config)] + list(_ranks(subject))


def _fields(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _REQUIRED:
        if name not in config:
            yield f"{name} is missing in adapter_config.json"
    for name in _REFUSED:
        if config.get(name):
            yield f"{name} is set"
    whole = [name for name in config.get("modules_to_save") or () if name not in _WHOLE]
    if whole:
        yield f"modules_to_save other than {' and '.join(_WHOLE)}: {', '.join(whole)}"
    if config.get("bias", "none") != "none":
        yield f"bias is {config['bias']}"
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _INITS:
        yield f"init_lora_weights is {init}, which changes the base's weights"
    odd = [key for key, rank in (config.get("rank_pattern") or {}).items() if not isinstance(rank, int) or rank <= 0]
    if odd:
        yield f"ranks that are no whole numbers above zero: {', '.join(odd)}"


def _ranks(subject: Subject) -> Iterator[LoaderFinding]:
    if max_lora_rank(subject.rank) is None:
        yield finding("rank limit", f"rank {subject.rank} is above {RANKS[-1]}, the largest --max-lora-rank")


def _installed() -> _Reader | None:
    """Return the reader that vLLM brings, where it can be imported."""
    found = reader("vllm", "vllm.lora.peft_helper", name="PEFTHelper")
    if found is None:
        return None
    helper, version = found

    def refused(subject: Subject) -> list[LoaderFinding]:
        limit = SimpleNamespace(max_lora_rank=max_lora_rank(subject.rank) or RANKS[-1])
        try:
            helper.from_dict(dict(subject.config)).validate_legal(limit)
        except (ValueError, TypeError) as error:
            return [finding("refused field", " ".join(str(error).split()))]
        return []

    def scale(subject: Subject, name: str) -> float:
        try:
            read = helper.from_dict(dict(subject.config))
        except (ValueError, TypeError):
            return subject.scale(name)  # it is refused, and has no scale
        by_module = getattr(read, "get_rank_and_scaling", None)  # earlier releases know one scale alone
        return float(by_module(name)[1] if by_module else read.vllm_lora_scaling_factor)

    return _Reader(version, "reader executed", refused, scale)


# --- tensors and model --------------------------------------------------------------------------------------


def _architecture(subject: Subject) -> Iterator[LoaderFinding]:
    architecture = subject.base.architecture
    if architecture in WITHOUT_LORA:
        yield finding("unsupported model", f"vLLM serves {architecture} without LoRA")


def _tensors(subject: Subject) -> Iterator[LoaderFinding]:
    """Find names that it cannot parse, and modules that are no layer of any model like this one."""
    strange = [*subject.with_adapter_name, *(key for key in subject.other_tensors if not _is_parsed(key))]
    if strange and not subject.config.get("modules_to_save"):  # those are refused by their field
        what = f"names that vLLM cannot parse, as {strange[0]}"
        yield finding("refused tensor", what, modules=len(strange), remedy="name the tensors as PEFT does")
    structure = subject.base.structure
    linear = {name.rpartition(".")[2] for name in structure.linear | structure.transposed} | {*_EMBEDDINGS}
    unknown = [name for name in subject.factors if name.rpartition(".")[2] not in linear and ".experts" not in name]
    if unknown:
        what = f"{counted(len(unknown), 'module')} of no name that its layers have, as {unknown[0]}"
        yield finding("missing module", what, modules=len(unknown))


def _is_parsed(key: str) -> bool:
    """Return whether vLLM can parse the name of a tensor that is no factor."""
    if key.endswith(tuple(f".{name}.base_layer.weight" for name in _EMBEDDINGS)):  # it passes over these
        return True
    module, _, last = key.rpartition(".")
    if last in {"weight", "bias"}:
        return module.rpartition(".")[2] in _WHOLE
    return last in {"lora_embedding_A", "lora_embedding_B"}


def _silent(subject: Subject) -> Iterator[LoaderFinding]:
    """Find modules by full names that no layer has: they are dropped, with a line in the debug log."""
    lost = [name for name in subject.factors if not _is_there(name, subject) and ".experts" not in name]
    if lost:
        kind: FindingKind = "silent no-op" if len(lost) == len(subject.factors) else "missing module"
        what = f"{counted(len(lost), 'module')} that the base lacks by that name, as {lost[0]}, dropped without a word"
        remedy = "use the base and class that the adapter's names are of"
        yield finding(kind, what, modules=len(lost), silent=True, remedy=remedy)


def _is_there(name: str, subject: Subject) -> bool:
    """Return whether the base has a module of this name.

    The checkpoint's names count, and those of the text-only class, which vLLM looks for as well.
    """
    every = subject.base.structure.every
    inner = name.removeprefix("model.")
    stripped = name.replace("model.language_model.", "model.", 1) if subject.base.architecture in _STRIPPED else name
    return bool({name, stripped} & every) or (inner != name and f"model.language_model.{inner}" in every)


def _flags(subject: Subject) -> list[str]:
    rank = max_lora_rank(subject.rank)
    flags = ["--enable-lora"]
    if rank is not None and rank > _DEFAULT_RANK:
        flags.append(f"--max-lora-rank {rank}")
    if any(name.startswith(_TOWERS) for name in subject.factors):
        flags.append("--enable-tower-connector-lora")
    return flags


def _notes(subject: Subject) -> Iterator[str]:
    if subject.subfolder:
        folder = subject.subfolder
        yield (
            f"--lora-modules takes no subfolder: download {folder}/ and name the local folder; or set {_RESOLVER}, and "
            f"ask for the model REPO/{folder}, of the base that adapter_config.json names, on its main branch"
        )
    if any(".experts" in name for name in subject.factors):
        yield "factors of experts are not looked into"
    plain = _plain_scale(subject)
    has_patterns = any(subject.config.get(field) for field in ("rank_pattern", "alpha_pattern"))
    if has_patterns and wrong_scales(subject, lambda _: plain, why="", remedy=MERGED):
        yield "releases that ignore rank_pattern and alpha_pattern scale some modules wrongly"


def _plain_scale(subject: Subject) -> float:
    """Return the one scale of every module for a release of vLLM that ignores the patterns."""
    rank = subject.config.get("r") or 1
    return float((subject.config.get("lora_alpha") or 0) / rank)
