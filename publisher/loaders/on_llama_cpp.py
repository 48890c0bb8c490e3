"""llama.cpp: rules read in its converter and in the code that loads the result.

The GGUF file holds one alpha; each module is scaled by alpha over its tensor's own rank, whatever adapter_config.json
says of patterns or rslora. Both complain of what they cannot place.

Where the rules stand, at the commits in `READ` of https://github.com/ggml-org/llama.cpp: `convert_lora_to_gguf.py` for
the tensors that it takes, the converter's class for each architecture, which that script loads, for their names and
for the order of linear attention's columns, and `llama_adapter_lora_weight::get_scale` in `src/llama-adapter` for the
scale. To renew them, read these again at a newer commit, write it into `READ`, and run tests/loaders and
tests/integration/test_exports.py.
"""

from collections.abc import Iterator

from publisher.errors import counted
from publisher.loaders.finding import (
    EXPORTED,
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
from publisher.loaders.subject import Subject
from publisher.records.filenames import GGUF
from publisher.records.loaders import LoaderFinding, LoaderVerdict

READ = "commits 0b03adaa, 0650ea8c"  # of the converter and of llama-adapter
_QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
_LOOKED_INTO = frozenset({*_QWEN3_5, "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_PREFIXES = ("model.layers.", "model.language_model.layers.", "lm_head", "model.embed_tokens")
_EXPORT = "write exports: [gguf] in the manifest, for a file in llama.cpp's own order and at one rank"
_PATTERNS = "llama.cpp divides one alpha by each tensor's rank"


def judge(subject: Subject) -> LoaderVerdict:
    """Return the verdict: on the export where there is one, else on what its converter makes of PEFT's files."""
    if "gguf" in subject.exports:
        return verdict("llama.cpp", READ, basis="read", findings=(), flags=[f"--lora {GGUF}"], notes=[EXPORTED])
    architecture = subject.base.architecture
    found = [*_tensors(subject), *_names(subject), *_columns(subject), *missing_factors(subject)]
    found += [*repeated_factors(subject), *_idle(subject), *other_base(subject, by="llama.cpp")]
    found += wrong_scales(subject, lambda name: scale(subject, name), why=_PATTERNS, remedy=_scale_remedy(subject))
    unknown = "" if architecture in _LOOKED_INTO else f"how llama.cpp names {architecture} was not looked into"
    flags = ["convert_lora_to_gguf.py --base BASE FOLDER", "--lora FILE.gguf"]
    return verdict("llama.cpp", READ, basis="read", findings=found, flags=flags, unknown=unknown)


def scale(subject: Subject, name: str) -> float:
    """Return a module's scale by llama.cpp's rule, for which an alpha of 0 counts as none."""
    alpha = subject.config.get("lora_alpha") or 0
    rank = subject.factors[name].rank
    return float(alpha / rank) if alpha and rank else 1.0


def _idle(subject: Subject) -> list[LoaderFinding]:
    """Find an adapter whose B is all zero: an alpha of 0, unlike elsewhere, is a wrong scale here."""
    return changes_nothing(subject) if len(subject.zero_factors) == len(subject.factors) else []


def _scale_remedy(subject: Subject) -> str:
    if subject.config.get("use_rslora"):
        return "multiply lora_alpha by the square root of r, and set use_rslora to false"
    return f"{_EXPORT}, or {UNIFORM}"


def _tensors(subject: Subject) -> Iterator[LoaderFinding]:
    rest = [key for key in subject.other_tensors if "lora_embedding_" not in key and ".base_layer.weight" not in key]
    norms = [key for key in rest if "_layernorm" in key or ".norm" in key]
    strange = [*subject.with_adapter_name, *(key for key in rest if key not in norms)]
    if strange:
        yield finding("refused tensor", f"the converter stops at {strange[0]}", modules=len(strange))
    if norms:
        what = f"{counted(len(norms), 'norm')} that the converter takes and llama.cpp passes over"
        yield finding("missing module", what, modules=len(norms), silent=True, remedy=MERGED)


def _names(subject: Subject) -> Iterator[LoaderFinding]:
    if subject.base.architecture not in _LOOKED_INTO:
        return
    beyond = set(subject.beyond_base)
    lost = [name for name in subject.factors if name in beyond or not name.startswith(_PREFIXES)]
    if lost:
        what = f"{counted(len(lost), 'module')} whose names the converter cannot map, as {lost[0]}"
        yield finding("missing module", what, modules=len(lost))


def _columns(subject: Subject) -> Iterator[LoaderFinding]:
    """Find modules whose columns llama.cpp stores in another order: out_proj, with more value heads than key heads."""
    text = subject.base.text
    keys = text.get("linear_num_key_heads") or 0
    values = text.get("linear_num_value_heads") or 0
    moved = [name for name in subject.factors if name.endswith("linear_attn.out_proj")]
    if moved and keys and values and keys != values and subject.base.architecture in _QWEN3_5:
        what = f"the converter cannot reorder the columns of {counted(len(moved), 'out_proj module')}"
        remedy = f"{_EXPORT}, or {MERGED}"
        yield finding("unsupported model", what, modules=len(moved), remedy=remedy)
