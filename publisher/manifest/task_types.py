"""Which of PEFT's task types fits a model class: the wrapper that it chooses must hand the class's inputs on.

PEFT's wrappers call the class with token ids and embeddings. A class that takes other inputs (Whisper, wav2vec2, ViT),
or both towers' at once (CLIP), is right without a task type. For some task types PEFT stores the head whole.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

_BY_ENDING: Mapping[str, str] = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
_HEADS: Mapping[str, tuple[str, ...]] = {  # by task type, as PeftModelFor... of PEFT 0.21 add them to modules_to_save
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
_SEQ2SEQ = ("ForConditionalGeneration", "MTModel")  # MarianMTModel


def task_type_of(model_class: str, config: Mapping[str, Any]) -> str | None:
    """Return the task type that works in PEFT for a class of transformers; None where none does.

    Args:
        model_class: the class's name.
        config: config.json of the model.
    """
    if not _takes_text(model_class):
        return None
    if model_class.endswith(_SEQ2SEQ) and config.get("is_encoder_decoder") is True:
        return "SEQ_2_SEQ_LM"
    return next((task for ending, task in _BY_ENDING.items() if model_class.endswith(ending)), "FEATURE_EXTRACTION")


def _takes_text(model_class: str) -> bool:
    """Return whether the class is called with token ids or their embeddings; true of one that is not known here."""
    import transformers

    found: Any = getattr(transformers, model_class, None)
    if not hasattr(found, "main_input_name"):
        return True
    return found.main_input_name == "input_ids" and "inputs_embeds" in inspect.signature(found.forward).parameters


def heads_of(task_type: str | None, modules: Iterable[str]) -> frozenset[str]:
    """Return the modules that PEFT saves whole by itself for adapters of this task type, as it finds them by name."""
    ends = _HEADS.get(task_type or "", ())
    return frozenset(name for name in modules if name.endswith(ends)) if ends else frozenset()
