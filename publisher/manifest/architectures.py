"""What a class of transformers is good for, by its name: which formats hold it, and whether it is a language model.

Names alone: no torch, so that a manifest can be checked against them. For exports it is known where llama.cpp and
mlx-lm have the weights of these classes; one that is not here is refused, since a wrong order of rows would load and
answer nonsense without a word.
"""

import re

LLAMA_CPP = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
}
"""What llama.cpp calls the architecture of each class (`general.architecture`)."""

MLX_LM = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3_5ForConditionalGeneration": {
        "model.language_model.": "language_model.model.",
        "lm_head": "language_model.lm_head",
    },
}
"""How mlx-lm renames the modules of each class, by the beginnings of their names."""

KNOWN = {"gguf": frozenset(LLAMA_CPP), "mlx": frozenset(MLX_LM)}
"""The classes of each format."""

_NO_NEXT_TOKEN = re.compile(
    r"Classification|QuestionAnswering|MultipleChoice|Detection|Segmentation|Estimation|Retrieval|Prediction|Regression"
    r"|ForCTC|ForXVector|ForPreTraining|(?<!LMHead)(?<!DoubleHeads)Model$"
)


def gives_next_token(model_class: str) -> bool:
    """Return whether a class of this name may give logits for the token after a text."""
    return _NO_NEXT_TOKEN.search(model_class) is None
