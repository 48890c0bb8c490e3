"""Small configurations of many classes of transformers, and which weights of each get an update."""

from dataclasses import dataclass, field
from typing import Any

import torch

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _TEXT | {"num_key_value_heads": 2, "head_dim": 8}
_NARROW = _TEXT | {"num_key_value_heads": 2}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SOUND = _TEXT | {
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
_QUERY = r"(self_attn|attention|attn)\.\S*(q_proj|query|v_proj|value)\.weight"


@dataclass(frozen=True)
class Case:
    """A class, its configuration, and a fine-tune of it.

    Attributes:
        model_class: of transformers.
        config: fields of its configuration.
        pattern: of the names, in the files, of the matrices that have an update.
        modules: how many modules of the class these are; 0 where all are experts.
        experts: how many parameters of experts these are.
        base, tuned: dtypes that the two are stored in.
    """

    model_class: str
    config: dict[str, Any]
    pattern: str = _QUERY
    modules: int = 4
    experts: int = 0
    base: torch.dtype = torch.bfloat16
    tuned: torch.dtype = torch.bfloat16
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "Llama": Case("LlamaForCausalLM", _GROUPED),
    "Llama with a tied head": Case("LlamaForCausalLM", _GROUPED | {"tie_word_embeddings": True}),
    "Llama in float16": Case("LlamaForCausalLM", _GROUPED, base=torch.float16, tuned=torch.float16),
    "Llama in float32": Case("LlamaForCausalLM", _GROUPED, base=torch.float32, tuned=torch.float32),
    "Llama without a head": Case("LlamaModel", _GROUPED),
    "Mistral": Case("MistralForCausalLM", _GROUPED),
    "Qwen2": Case("Qwen2ForCausalLM", _NARROW),
    "Qwen3": Case("Qwen3ForCausalLM", _GROUPED),
    "Qwen3.5": Case("Qwen3_5ForCausalLM", _GROUPED | _LINEAR_ATTENTION, r"in_proj_qkv|self_attn\.[qv]_proj", 3),
    "Gemma 2": Case("Gemma2ForCausalLM", _GROUPED),
    "Gemma 3": Case("Gemma3ForCausalLM", _GROUPED),
    "Phi-3": Case("Phi3ForCausalLM", _NARROW, r"qkv_proj", 2),
    "GPT-NeoX": Case("GPTNeoXForCausalLM", _TEXT, r"query_key_value\.weight", 2),
    "GPT-2": Case(
        "GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "c_attn", 2
    ),
    "OPT": Case("OPTForCausalLM", _TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "OLMo 2": Case("Olmo2ForCausalLM", _NARROW),
    "StableLM": Case("StableLmForCausalLM", _NARROW),
    "Cohere": Case("CohereForCausalLM", _NARROW),
    "Falcon": Case("FalconForCausalLM", _TEXT, r"query_key_value\.weight", modules=0, experts=2),
    "BERT": Case("BertForMaskedLM", _TEXT),
    "BERT classifier": Case("BertForSequenceClassification", _TEXT),
    "RoBERTa": Case("RobertaForTokenClassification", _TEXT | {"max_position_embeddings": 66, "pad_token_id": 1}),
    "ModernBERT": Case("ModernBertForMaskedLM", _TEXT | {"cls_token_id": 1, "sep_token_id": 2}, r"attn\.Wqkv", 2),
    "DeBERTa v2": Case("DebertaV2ForSequenceClassification", _TEXT, r"(query|value)_proj\.weight"),
    "DistilBERT": Case(
        "DistilBertForQuestionAnswering",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
        r"[qv]_lin\.weight",
    ),
    "T5": Case(
        "T5ForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        r"\.(q|v)\.weight",
        12,
    ),
    "BART": Case(
        "BartForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        r"[qv]_proj\.weight",
        6,
    ),
    "Whisper": Case(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        r"[qv]_proj\.weight",
        6,
    ),
    "wav2vec 2": Case("Wav2Vec2ForCTC", _SOUND | {"vocab_size": 32}),
    "HuBERT": Case("HubertForCTC", _SOUND | {"vocab_size": 32}),
    "AST": Case(
        "ASTForAudioClassification",
        {k: v for k, v in _VISION.items() if k != "image_size"}
        | {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    ),
    "ViT": Case("ViTForImageClassification", _VISION),
    "DINOv2": Case("Dinov2ForImageClassification", _VISION),
    "SigLIP vision": Case("SiglipVisionModel", _VISION),
    "CLIP": Case(
        "CLIPModel",
        {"text_config": _TEXT, "vision_config": _VISION | {"num_hidden_layers": 1}, "projection_dim": 16},
        modules=6,
    ),
    "LLaVA": Case(
        "LlavaForConditionalGeneration",
        {
            "text_config": _GROUPED | {"model_type": "llama"},
            "vision_config": _VISION | {"model_type": "clip_vision_model"},
            "image_token_index": 63,
        },
        r"language_model\S*[qv]_proj\.weight",
    ),
    "Gemma 3 with pictures": Case(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": _GROUPED,
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 63,
            "boi_token_index": 61,
            "eoi_token_index": 62,
        },
        r"language_model\S*[qv]_proj\.weight",
    ),
    "Mamba": Case(
        "MambaForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        r"in_proj|x_proj",
    ),
    "Mixtral": Case(
        "MixtralForCausalLM",
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        r"self_attn\.[qv]_proj|experts\.1\.w[12]\.",
        experts=4,
    ),
    "Qwen3-MoE": Case("Qwen3MoeForCausalLM", _GROUPED | _EXPERTS, r"self_attn\.[qv]_proj|experts\.[02]\.", experts=4),
    "Qwen3.5-MoE": Case(
        "Qwen3_5MoeForCausalLM",
        _GROUPED | _EXPERTS | _LINEAR_ATTENTION | {"shared_expert_intermediate_size": 16},
        r"self_attn\.[qv]_proj|shared_expert\.up_proj|experts\.(gate_up|down)_proj|experts\.1\.",
        experts=4,
    ),
    "gpt-oss": Case(
        "GptOssForCausalLM",
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
        r"self_attn\.[qv]_proj\.weight",
    ),
}
