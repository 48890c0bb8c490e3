"""The classes of transformers for which it is known where llama.cpp and mlx-lm have their weights.

Names alone: no torch, so that a manifest can be checked against them. A class that is not here is refused by the
export, since a wrong order of rows would load and answer nonsense without a word.
"""

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
