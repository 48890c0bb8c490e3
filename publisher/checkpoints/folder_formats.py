"""What a folder or repository is that holds no plain checkpoint, told by the names of its files.

Nothing is opened: an adapter, a diffusers pipeline, the shards of a training framework or pickled weights are known by
the files that they alone have. Each kind has a name and the next step, and docs/inputs.md has them all.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """A kind of folder that is no plain checkpoint.

    Attributes:
        name: completes "the folder holds ...".
        shown_by: a pattern of the path of a file that folders of this kind have, and no other kind before it.
        next_step: what to do about it.
    """

    name: str
    shown_by: re.Pattern[str]
    next_step: str


def _kind(name: str, shown_by: str, next_step: str) -> FolderFormat:
    return FolderFormat(name, re.compile(shown_by), next_step)


_LOOKED_AT: Final = 10_000  # files, those of the upper folders first
_SAVE: Final = "load the model with the library that wrote it, write it with save_pretrained, and name that folder"
_PICKLED_NEXT: Final = "load the model where you trust it, and write it with save_pretrained as safetensors"
DIFFUSERS_NEXT: Final = (
    "save its LoRA with diffusers (save_lora_weights) before it is merged: this tool builds classes of transformers "
    "alone, and could not show that an adapter for this one loads and does what it should"
)
MISTRAL_NEXT: Final = (
    "convert it with the script beside that model in transformers (convert_..._weights_to_hf.py), or name a repository "
    "that has it in transformers' format"
)
_TRAINING: Final = r"(optimizer|scheduler|scaler|rng_state|random_states|trainer_state|training_args|sampler)"

FOLDER_FORMATS: Final = (
    _kind(
        "a PEFT adapter, not a model that has one merged in",
        r"adapter_(config\.json|model\.(safetensors|bin))",
        "name the whole model as base and, as source, the model after merge_and_unload() and save_pretrained; an "
        "adapter itself is looked at by: publish audit FOLDER",
    ),
    _kind(
        "a LoRA without its model",
        r"(pytorch_lora_weights\.(safetensors|bin)|adapters\.(safetensors|npz)|[^/]*[-_.]lora\.safetensors)",
        "merge it into its base with the library that trained it, save the whole model, and name that as source",
    ),
    _kind(
        "a diffusers pipeline, which is several models",
        r"model_index\.json",
        "name one model of it by a local path, such as FOLDER/text_encoder; it must be of a class of transformers, "
        "since PEFT's adapters for diffusers' own classes are another format",
    ),
    _kind(
        "a diffusers model",
        r"([^/]+/)?diffusion_pytorch_model[^/]*\.(safetensors|bin)(\.index\.json)?",
        DIFFUSERS_NEXT,
    ),
    _kind(
        "a checkpoint of Mistral's or Meta's own format",
        r"(original/)?consolidated[^/]*\.(safetensors|pth|pt)(\.index\.json)?",
        MISTRAL_NEXT,
    ),
    _kind(
        "a checkpoint that has only a variant of its weights",
        r"(model\.(?!safetensors)[\w-]+\.safetensors(\.index\.json)?|model\.safetensors\.index\.[\w-]+\.json|"
        r"model\.[\w-]+-\d+-of-\d+\.safetensors|model-\d+-of-\d+\.[\w-]+\.safetensors)",
        'load it with from_pretrained(FOLDER, variant="..."), write it with save_pretrained, and name that folder; one '
        "file alone may simply be renamed to model.safetensors",
    ),
    _kind(
        "a checkpoint whose shards have no index",
        r"model-\d+-of-\d+\.safetensors",
        "download model.safetensors.index.json too, or save the checkpoint again",
    ),
    _kind(
        "a state of vLLM's, cut for one number of GPUs",
        r"model-rank-\d+-part-\d+\.safetensors",
        "name the checkpoint that it was made from",
    ),
    _kind(
        "OpenCLIP's own format",
        r"open_clip_[^/]*",
        "convert it to transformers' CLIPModel, and name that folder",
    ),
    _kind(
        "only pickled weights, which are never loaded here since loading them runs code",
        r"(pytorch_model|model-\d+-of-\d+|pytorch_model-\d+-of-\d+)\.bin(\.index\.json)?",
        _PICKLED_NEXT,
    ),
    _kind(
        "DeepSpeed's state of a training run",
        r"(.*/)?(zero_to_fp32\.py|(bf16_|fp16_)?zero_pp_rank_[^/]*|mp_rank_[^/]*_model_states\.pt)|global_step\d+/.*",
        "put the weights together with DeepSpeed's zero_to_fp32.py, load them into the model, write it with "
        "save_pretrained, and name that folder",
    ),
    _kind(
        "Megatron's or NeMo's state of a training run",
        r"(.*/)?(model_optim_rng\.pt|latest_checkpointed_iteration\.txt|[^/]*\.nemo|distrib_optim\.pt)",
        "convert it with that framework's export to Hugging Face, and name that folder",
    ),
    _kind(
        "shards of torch.distributed (FSDP, DCP)",
        r"(.*/)?([^/]*\.distcp|pytorch_model_fsdp_\d+(/.*)?)",
        "put them together with: accelerate merge-weights FOLDER OUT; load that into the model, write it with "
        "save_pretrained, and name that folder",
    ),
    _kind(
        "a checkpoint of MLX before it wrote model.safetensors",
        r"weights(\.\d+)?\.(npz|safetensors)",
        "name the checkpoint that it was converted from",
    ),
    _kind(
        "other folders, each with a checkpoint of its own",
        r"[^/]+/((model(-\d+-of-\d+)?\.safetensors(\.index\.json)?)|pytorch_model\.bin|adapter_config\.json)",
        "name one of them by a local path; a folder inside a repository is downloaded first",
    ),
    _kind(
        "huggingface_hub's cache of a repository",
        r"refs/[^/]+|snapshots/[^/]+/.*",
        "name the repository itself, or its folder below snapshots/",
    ),
    _kind(
        "quantised weights under a name of their own",
        r"(?i)[^/]*(gptq|awq|exl[23]|bnb|nf4|fp4|fp8|int[48]|[48]bit)[^/]*\.safetensors|quantize_config\.json",
        "name the checkpoint before it was quantised",
    ),
    _kind(
        "safetensors under a name that transformers does not look for",
        r"(?!adapter)[^/]+\.safetensors",
        "rename it to model.safetensors if it is the whole model, in transformers' names; else " + _SAVE,
    ),
    _kind(
        "an export for another runtime (OpenVINO, TensorRT, Core ML, ExecuTorch, CTranslate2)",
        r"[^/]*\.(engine|plan|mlmodel|pte)|openvino_[^/]*|[^/]*\.mlpackage/.*|shared_vocabulary\.\w+",
        "name the checkpoint that it was exported from",
    ),
    _kind(
        "pickled files, which are never loaded here since loading them runs code",
        rf"(?!{_TRAINING}|ggml)[^/]*\.(bin|pt|pth|ckpt|pkl|pickle|joblib|th|tar)",
        _PICKLED_NEXT,
    ),
    _kind(
        "GGUF, which llama.cpp reads",
        r"(.*/)?([^/]*\.(gguf|ggml|llamafile)|ggml[^/]*\.bin)",
        "name the checkpoint that it was converted from, which save_pretrained wrote",
    ),
    _kind(
        "only ONNX",
        r"(.*/)?[^/]*\.(onnx|onnx_data|ort)",
        "name the checkpoint that it was exported from",
    ),
    _kind(
        "weights for TensorFlow, Keras or JAX alone",
        r"(.*/)?([^/]*\.(h5|keras|msgpack|tflite|index)|saved_model\.pb|_CHECKPOINT_METADATA)",
        "load it with the library that wrote it, write it as safetensors with save_pretrained, and name that folder",
    ),
    _kind(
        "the state of a training run without the model",
        rf"(checkpoint-\d+/)?{_TRAINING}[^/]*",
        "name a checkpoint of that run that has its weights; a Trainer saves them with save_only_model or save_model",
    ),
)
"""In the order in which they are tried: the more telling file first."""


def folder_format(names: Collection[str]) -> tuple[FolderFormat, str] | None:
    """Return what a folder without model.safetensors and its index is, and the file that shows it.

    Args:
        names: paths of its files, with `/`, those of its own folders included.

    Returns:
        The kind and the first such file by name; None where no kind is known.
    """
    ordered = sorted(names, key=lambda name: (name.count("/"), name))[:_LOOKED_AT]
    for kind in FOLDER_FORMATS:
        if (found := next((name for name in ordered if kind.shown_by.fullmatch(name)), None)) is not None:
            return kind, found
    return None
