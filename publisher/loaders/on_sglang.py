"""SGLang: rules read in its source; its own reader of adapter_config.json is run where SGLang is installed.

It knows one scale, lora_alpha / r, and one rank for all modules. Layers are found by their number and by the last part
of a module's name, so that a prefix of another class does no harm; what it packs into one weight has to be complete.

Where the rules stand, under `sglang/srt/lora/` in the wheel of the version in `READ`: `lora_config.py` for the fields,
`lora.py` for names, packing and scale, `utils.py` (`get_normalized_target_modules`, `get_hidden_dim`) for what layers
are called, `mem_pool.py` for ranks and for modules without a buffer. To renew them, read these again in a newer wheel,
write its version into `READ`, and run tests/loaders.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
from publisher.records.loaders import Basis, LoaderFinding, LoaderVerdict

READ = "0.5.23"
_NORMALISED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "unembed_tokens": "lm_head",
}
_DENSE = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"})
_LINEAR_ATTENTION = _DENSE | {"out_proj", "in_proj_qkvz"}
_QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
_KNOWN = dict.fromkeys(_QWEN3_5, _LINEAR_ATTENTION) | dict.fromkeys(
    (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
    ),
    _DENSE,
)
_EVERYTHING = ("all", "all-linear")
_PACKED = {"q_proj": ("v_proj",), "k_proj": ("q_proj", "v_proj"), "v_proj": ("q_proj",), "up_proj": ("gate_proj",)}


@dataclass(frozen=True, slots=True)
class _Reader:
    """What reads adapter_config.json: SGLang's own class, or the rules read in it."""

    version: str
    basis: Basis
    scale: Callable[[Subject], float]


def judge(subject: Subject) -> LoaderVerdict:
    """Return the verdict on SGLang."""
    reader = _installed() or _Reader(READ, "read", _scale)
    architecture = subject.base.architecture
    found = [*_fields(subject), *_modules(subject), *_packed(subject), *_ranks(subject), *_layers(subject)]
    found += [*_others(subject), *missing_factors(subject), *repeated_factors(subject), *changes_nothing(subject)]
    found += other_base(subject, by="SGLang")
    scale = reader.scale(subject)
    why = "SGLang scales every module by lora_alpha / r, without patterns or rslora"
    found += wrong_scales(subject, lambda _: scale, why=why, remedy=UNIFORM)
    unknown = "" if architecture in _KNOWN else f"which modules SGLang adapts in {architecture} was not looked into"
    flags = ["--enable-lora", "--lora-paths NAME=FOLDER"]
    return verdict(
        "SGLang",
        reader.version,
        basis=reader.basis,
        findings=found,
        flags=flags,
        notes=tuple(_notes(subject)),
        unknown=unknown,
    )


def normalised(name: str) -> str:
    """Return the layer of SGLang that this module is part of, by the last part of its name."""
    last = name.rpartition(".")[2]
    return _NORMALISED.get(last, last)


def _scale(subject: Subject) -> float:
    return float((subject.config.get("lora_alpha") or 0) / (subject.config.get("r") or 1))


def _installed() -> _Reader | None:
    """Return the reader that SGLang brings, where it can be imported."""
    found = reader("sglang", "sglang.srt.lora.lora_config", name="LoRAConfig")
    if found is None:
        return None
    config, version = found

    def scale(subject: Subject) -> float:
        read = config.from_dict(dict(subject.config))
        return float(read.lora_alpha / read.r)

    return _Reader(version, "reader executed", scale)


def _fields(subject: Subject) -> Iterator[LoaderFinding]:
    config = subject.config
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets not in _EVERYTHING:
        remedy = "list the modules' names in target_modules"
        yield finding("refused field", "target_modules is a pattern, and SGLang takes a list", remedy=remedy)
    elif not isinstance(targets, str | list):
        yield finding("refused field", "target_modules is no list", remedy="list the modules' names in target_modules")
    if config.get("use_dora"):
        yield finding("refused field", "DoRA (use_dora)")


def _modules(subject: Subject) -> Iterator[LoaderFinding]:
    known = _KNOWN.get(subject.base.architecture)
    if known is None:
        return
    lost = [name for name in subject.factors if normalised(name) not in known]
    if lost:
        kinds = sorted({name.rpartition(".")[2] for name in lost})
        what = f"{counted(len(lost), 'module')} that SGLang has no place for in this model: {', '.join(kinds)}"
        yield finding("missing module", what, modules=len(lost))


def _packed(subject: Subject) -> Iterator[LoaderFinding]:
    """Find modules that lack what SGLang packs with them.

    q, k and v go into one weight, gate and up into another: q and v, and gate, must be there.
    """
    lacking = []
    for name in subject.factors:
        parent, _, last = name.rpartition(".")
        if any(f"{parent}.{other}" not in subject.factors for other in _PACKED.get(last, ())):
            lacking.append(name)
    if lacking:
        what = f"{counted(len(lacking), 'module')} without the others that SGLang packs with it, as {lacking[0]}"
        yield finding("missing module", what, modules=len(lacking))


def _ranks(subject: Subject) -> Iterator[LoaderFinding]:
    other = [name for name, factors in subject.factors.items() if factors.rank != subject.config.get("r")]
    if other:
        what = f"{counted(len(other), 'module')} of another rank than r, and SGLang's buffers have one rank"
        yield finding("refused tensor", what, modules=len(other), remedy=UNIFORM)


def _layers(subject: Subject) -> Iterator[LoaderFinding]:
    beyond = subject.beyond_base
    if beyond:
        what = f"{counted(len(beyond), 'module')} in layers that the base lacks, as {beyond[0]}"
        yield finding("missing module", what, modules=len(beyond), remedy="use the base that the adapter is for")


def _others(subject: Subject) -> Iterator[LoaderFinding]:
    """Find tensors that are no factors: in a layer an error, of embeddings and head dropped without a word."""
    inner = [key for key in subject.other_tensors if ".layers." in key]
    outer = [key for key in subject.other_tensors if ".layers." not in key and "lora_embedding_" not in key]
    if inner:
        yield finding("refused tensor", f"tensors that are no factors, as {inner[0]}", modules=len(inner))
    if outer:
        what = f"whole tensors that SGLang drops without a word, as {outer[0]}"
        yield finding("missing module", what, modules=len(outer), silent=True, remedy=MERGED)


def _notes(subject: Subject) -> Iterator[str]:
    if subject.subfolder:
        yield f"it takes no subfolder of a repository: download {subject.subfolder}/ and name the local folder"
