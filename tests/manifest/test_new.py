"""The manifest that `publish new` writes: read from real checkpoints, and sound as it stands."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from publisher.errors import ExtractionError, FetchError, PublisherError
from publisher.manifest.new import new_manifest
from publisher.manifest.reading import read_manifest
from publisher.manifest.schema import Manifest

Shapes = dict[str, tuple[int, ...]]
WEIGHTS: Shapes = {"model.layers.0.q_proj.weight": (8, 4), "model.layers.0.norm.weight": (4,), "lm_head.weight": (6, 4)}
LLAMA: dict[str, object] = {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checkpoint(
    folder: Path,
    shapes: Shapes = WEIGHTS,
    *,
    config: dict[str, object] = LLAMA,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """A checkpoint folder of one safetensors file; its path relative to where the test runs."""
    folder.mkdir(parents=True)
    save_file({name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder.name


def written(text: str) -> Manifest:
    path = Path("new.yaml")
    path.write_text(text, encoding="utf-8")
    manifest, problems = read_manifest(path)
    assert problems == ()
    assert manifest is not None
    return manifest


def test_two_checkpoints_become_this_manifest(folder: Path, golden: Callable[[Path, str], None]) -> None:
    text = new_manifest(tuned=checkpoint(folder / "tuned"), base=checkpoint(folder / "base"))
    golden(Path(__file__).parents[1] / "golden/new_manifest.yaml", text)
    variant = written(text).variants[0]
    assert (variant.source.path, variant.base.path) == ("tuned", "base")
    assert (variant.model_class, variant.adapter.task_type) == ("LlamaForCausalLM", "CAUSAL_LM")
    assert (variant.adapter.dtype, variant.adapter.rank) == ("bfloat16", "auto")


def test_the_example_expectation_is_sound_once_uncommented(folder: Path) -> None:
    text = new_manifest(tuned=checkpoint(folder / "tuned"), base=checkpoint(folder / "base"))
    assert written(text.replace("    # expect:", "    expect:")).variants[0].expect.layers == "40-63"


def test_an_absolute_folder_is_written_relative_to_where_one_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(folder / "models/tuned")
    checkpoint(folder / "models/base")
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    source = written(new_manifest(tuned=str(folder / "models/tuned"), base="../models/base")).variants[0].source
    assert source.path == "../models/tuned"


@pytest.mark.parametrize("name", ["my model", "v1: café #2", "--x..y__", "1", "-"])
def test_a_folder_of_any_name_gives_a_sound_manifest(name: str, folder: Path) -> None:
    source = checkpoint(folder / name)
    manifest = written(new_manifest(tuned=source, base=checkpoint(folder / "base")))
    assert (manifest.variants[0].source.path, manifest.variants[0].label) == (name, name)


@pytest.mark.parametrize(
    ("dtype", "named"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")]
)
def test_the_adapter_has_the_dtype_of_the_source(dtype: torch.dtype, named: str, folder: Path) -> None:
    text = new_manifest(tuned=checkpoint(folder / "tuned", dtype=dtype), base=checkpoint(folder / "base"))
    assert written(text).variants[0].adapter.dtype == named


@pytest.mark.parametrize(
    ("config", "task_type"),
    [
        ({"architectures": ["BertForSequenceClassification"]}, "SEQ_CLS"),
        ({"architectures": ["BertForTokenClassification"]}, "TOKEN_CLS"),
        ({"architectures": ["BertForQuestionAnswering"]}, "QUESTION_ANS"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "FEATURE_EXTRACTION"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "SEQ_2_SEQ_LM"),
        ({"architectures": ["BertModel"]}, "FEATURE_EXTRACTION"),
        ({"architectures": ["GPT2LMHeadModel"]}, "CAUSAL_LM"),
        ({"architectures": ["MarianMTModel"], "is_encoder_decoder": True}, "SEQ_2_SEQ_LM"),
        ({"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}, None),
        ({"architectures": ["Wav2Vec2ForSequenceClassification"]}, None),
        ({"architectures": ["ViTForImageClassification"]}, None),
        ({"architectures": ["CLIPModel"]}, None),
    ],
)
def test_the_task_type_follows_from_the_class(config: dict[str, object], task_type: str | None, folder: Path) -> None:
    text = new_manifest(tuned=checkpoint(folder / "tuned", config=config), base=checkpoint(folder / "base"))
    assert written(text).variants[0].adapter.task_type == task_type


@pytest.mark.parametrize(
    ("card", "stated"),
    [
        ("---\nlicense: cc-by-nc-4.0\ntags: [x]\n---\n# Model\n", "cc-by-nc-4.0"),
        ("---\r\nlicense: mit\r\n---\r\n", "mit"),
        ("---\nlicense: My Own Licence\n---\n", "other"),
        ("---\nlicense: [mit]\n---\n", "other"),
        ("---\nlicense: {\n---\n", "other"),
        ("# No front matter\n---\nlicense: mit\n---\n", "other"),
    ],
)
def test_the_licence_is_the_one_that_the_source_states(card: str, stated: str, folder: Path) -> None:
    source = checkpoint(folder / "tuned")
    (folder / "tuned/README.md").write_bytes(card.encode())
    assert written(new_manifest(tuned=source, base=checkpoint(folder / "base"))).license == stated


def test_different_shapes_are_named_with_both_and_ten_at_most(folder: Path) -> None:
    source = checkpoint(folder / "tuned", {f"w{index:02}.weight": (2, 3) for index in range(12)})
    base = checkpoint(folder / "base", {f"w{index:02}.weight": (2, 4) for index in range(12)})
    with pytest.raises(ExtractionError, match="12 tensors differ in shape between tuned and base") as caught:
        new_manifest(tuned=source, base=base)
    assert "w09.weight [2, 3] and [2, 4], and 2 more" in str(caught.value)
    assert "w10" not in str(caught.value)


def test_checkpoints_without_a_matrix_in_common_are_no_pair(folder: Path) -> None:
    source = checkpoint(folder / "tuned", {"model.a.weight": (2, 3), "norm.weight": (3,)})
    base = checkpoint(folder / "base", {"a.weight": (2, 3), "norm.weight": (3,)})
    with pytest.raises(ExtractionError, match=r"no weight matrix in common: one holds model\.a\.weight"):
        new_manifest(tuned=source, base=base)


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": "x"}, {"architectures": ["a.b"]}])
def test_a_config_that_names_no_class_is_refused(config: dict[str, object], folder: Path) -> None:
    source = checkpoint(folder / "tuned", config=config)
    with pytest.raises(PublisherError, match=r"config\.json of tuned does not say which class"):
        new_manifest(tuned=source, base=checkpoint(folder / "base"))


def test_a_quantised_source_is_refused(folder: Path) -> None:
    source = checkpoint(folder / "tuned", dtype=torch.int8)
    with pytest.raises(PublisherError, match="tuned is quantised: weights packed in I8"):
        new_manifest(tuned=source, base=checkpoint(folder / "base"))


def test_a_folder_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(FetchError, match="nowhere"):
        new_manifest(tuned="./nowhere", base=checkpoint(folder / "base"))


def test_check_pin_and_new_start_without_torch() -> None:
    heavy = "{'torch', 'transformers', 'peft'}"
    code = f"import sys, publisher.manifest.new, publisher.manifest.pin; print(sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
