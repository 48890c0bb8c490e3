"""Adapters that PEFT itself writes for tiny models, and what a real load on the base's weights makes of each."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from publisher.adapters.loading import quiet

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MIXTRAL = _LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2}
_GPT_OSS = _LLAMA | {"head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 8}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_IDS = torch.tensor([[3, 5, 7, 11, 13, 17, 19, 23, 29, 31]])
_CLOSE = 1e-4  # of the logits' norm

Change = Callable[[Path], None]


def _edited(**fields: Any) -> Change:
    """Set fields of adapter_config.json, as people do by hand."""

    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _unchanged(_: Path) -> None:
    pass


@dataclass(frozen=True)
class Written:
    """One adapter: the settings that PEFT gets, the base, and what is done before and after it is saved.

    Attributes:
        settings: of LoraConfig, beside r, lora_alpha and target_modules.
        architecture: the class of the base.
        changes: to the base's configuration.
        prepare: what is done with the model before PEFT gets it, as resizing its table.
        saving: arguments of save_pretrained.
        trained: whether its factors are no longer those of the initialisation.
        change: what is done to its files after.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = "LlamaForCausalLM"
    changes: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], object] = lambda _: None
    saving: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = True
    change: Change = _unchanged

    def base(self) -> Any:
        """Return the base with random weights, always the same ones."""
        torch.manual_seed(3)
        model_class = getattr(transformers, self.architecture)
        sizes = {"GPT2LMHeadModel": _GPT2, "MixtralForCausalLM": _MIXTRAL, "GptOssForCausalLM": _GPT_OSS}
        fields = {**sizes.get(self.architecture, _LLAMA), "pad_token_id": 0, "eos_token_id": 1, **self.changes}
        return model_class(model_class.config_class(**fields)).eval()

    def write(self, folder: Path) -> torch.Tensor:
        """Write FOLDER/base and FOLDER/adapter, and return the logits of the adapted model as it was saved."""
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.base().save_pretrained(folder / "base")
            model = self.base()
            self.prepare(model)
            given = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
            adapted = peft.get_peft_model(model, peft.LoraConfig(**{**given, **self.settings})).eval()
            if self.trained:
                _train(adapted)
            adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
            adapted.save_pretrained(folder / "adapter", **self.saving)
        self.change(folder / "adapter")
        return _logits(adapted)

    def outcome(self, folder: Path, saved: torch.Tensor, *, by: str) -> str:
        """Return what a load with weights comes to, in compat's words: `yes`, `no` or `wrongly`."""
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = _logits(self.base())
            try:
                loaded = _logits(_loaded(self.base(), folder / "adapter", by=by).eval())
            except Exception:  # noqa: BLE001 - whatever PEFT raises is a refusal
                return "no"
        norm = plain.norm()
        moved = (loaded - plain).norm() > _CLOSE * norm
        return "yes" if moved and loaded.shape == saved.shape and (loaded - saved).norm() < _CLOSE * norm else "wrongly"


def _loaded(base: Any, adapter: Path, *, by: str) -> Any:
    """Load it as users of PEFT, or of transformers alone, do."""
    if by == "PEFT":
        return peft.PeftModel.from_pretrained(base, adapter)
    base.load_adapter(str(adapter))
    return base


def _train(adapted: Any) -> None:
    """Move whatever would be trained, as training does."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=_IDS).logits
    return logits


def _gradients(model: Any) -> None:
    """Leave the gradients that LoRA-GA begins with, as its estimation does."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer._peft_loraga_grad = torch.randn_like(layer.weight)


def _larger_table(model: Any) -> None:
    model.resize_token_embeddings(70)


_TIED = {"tie_word_embeddings": True}
_BIASED = {"attention_bias": True}
_EXPERTS = ["0.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"]

WRITTEN = {
    "plain": Written(),
    "rslora": Written({"use_rslora": True}),
    "dora": Written({"use_dora": True}),
    "dora, rows and head": Written({"use_dora": True, "trainable_token_indices": [2], "modules_to_save": ["lm_head"]}),
    "dora on the table": Written({"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]}),
    "pissa": Written({"init_lora_weights": "pissa"}),
    "pissa, fast": Written({"init_lora_weights": "pissa_niter_4"}),
    "pissa, transposed": Written(
        {"init_lora_weights": "pissa", "target_modules": ["c_attn"], "fan_in_fan_out": True}, "GPT2LMHeadModel"
    ),
    "olora": Written({"init_lora_weights": "olora"}),
    "orthogonal": Written({"init_lora_weights": "orthogonal"}),
    "gaussian": Written({"init_lora_weights": "gaussian"}),
    "mica": Written({"init_lora_weights": "mica"}),
    "eva": Written({"init_lora_weights": "eva"}),
    "lora_ga": Written({"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()}, prepare=_gradients),
    "corda": Written(change=_edited(init_lora_weights="corda")),
    "loftq": Written(change=_edited(init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 1})),
    "an initialisation of the future": Written(change=_edited(init_lora_weights="something_new")),
    "random": Written({"init_lora_weights": False}),
    "bias of its modules": Written({"bias": "lora_only"}, changes=_BIASED),
    "every bias": Written({"bias": "all"}, changes=_BIASED),
    "lora_bias": Written({"lora_bias": True}),
    "excluded": Written({"target_modules": "all-linear", "exclude_modules": ["down_proj"]}),
    "excluded by a pattern": Written({"target_modules": "all-linear", "exclude_modules": r".*layers\.0.*"}),
    "all-linear": Written({"target_modules": "all-linear"}),
    "a pattern": Written({"target_modules": r".*self_attn\.(q|k)_proj"}),
    "one layer": Written({"layers_to_transform": [1]}),
    "one layer by its pattern": Written({"layers_to_transform": [1], "layers_pattern": "layers"}),
    "layers replicated": Written({"layer_replication": [[0, 2], [1, 2]]}),
    "rows of the table": Written({"trainable_token_indices": [3, 5, 7]}),
    "rows by module": Written({"trainable_token_indices": {"embed_tokens": [3, 5]}}),
    "rows of a tied table": Written({"trainable_token_indices": [3, 5, 7]}, changes=_TIED),
    "table": Written({"target_modules": ["q_proj", "embed_tokens"]}),
    "table alone": Written({"target_modules": ["embed_tokens"]}),
    "head": Written({"target_modules": ["q_proj", "lm_head"]}),
    "tied table": Written({"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}, changes=_TIED),
    "tables saved along": Written(saving={"save_embedding_layers": True}),
    "tables whole": Written({"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied table whole": Written({"modules_to_save": ["embed_tokens"]}, changes=_TIED),
    "tied table whole, tied again": Written(
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, changes=_TIED
    ),
    "norm whole": Written({"modules_to_save": ["norm"]}),
    "larger table whole": Written({"modules_to_save": ["embed_tokens", "lm_head"]}, prepare=_larger_table),
    "larger table saved along": Written(prepare=_larger_table),
    "alpha 0": Written({"lora_alpha": 0}),
    "alpha 0 by pattern": Written({"alpha_pattern": {"v_proj": 0}, "lora_alpha": 0}),
    "alpha 0 and a whole norm": Written({"lora_alpha": 0, "modules_to_save": ["norm"]}),
    "untrained": Written(trained=False),
    "rank 1": Written({"r": 1}),
    "ranks by pattern": Written({"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 16}}),
    "ranks by pattern, one alpha": Written({"rank_pattern": {r"layers\.0\..*q_proj": 8}}),
    "no task type": Written({"task_type": None}),
    "invoked by tokens": Written({"alora_invocation_tokens": [11, 13]}),
    "kasa": Written({"kasa_config": {}}),
    "qalora": Written({"use_qalora": True}),
    "classifier": Written({"task_type": "SEQ_CLS"}, "LlamaForSequenceClassification"),
    "transposed": Written({"target_modules": ["c_attn"], "fan_in_fan_out": True}, "GPT2LMHeadModel"),
    "transposed and not told": Written({"target_modules": ["c_attn"]}, "GPT2LMHeadModel"),
    "experts": Written({"target_modules": [], "target_parameters": _EXPERTS}, "MixtralForCausalLM"),
    "experts stored transposed": Written(
        {"target_modules": "all-linear", "target_parameters": _EXPERTS}, "GptOssForCausalLM"
    ),
    "experts at another rank": Written(
        {"target_parameters": _EXPERTS[1:], "rank_pattern": {"experts.down_proj": 2}}, "MixtralForCausalLM"
    ),
}
