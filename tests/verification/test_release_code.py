"""What a release brings to answer requests is tried before any long work, and whatever it raises is one error."""

import json
from pathlib import Path

import pytest
import transformers

from publisher.errors import VerificationError
from publisher.manifest.schema import AdapterSettings, Reference, Variant, VerificationSettings
from publisher.verification.release_code import require_answering
from tests.manifests import ADAPTER
from tests.words import write_tokenizer

MODULE = "joint_schema_model.py"
REST = "def encode_record(): ...\ndef collate_records(): ...\n"
ON_TOKENIZER = f"""
import transformers
def load_release_model(path, device, dtype):
    return None, _processor(path)
def _processor(path):
    return transformers.AutoTokenizer.from_pretrained(path)
{REST}"""
ON_PROCESSOR = f"""
def load_release_model(path, device, dtype):
    from transformers import AutoProcessor
    return None, AutoProcessor.from_pretrained(path)
{REST}"""
QWEN = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}


def variant(model_class: str = "Qwen3_5ForConditionalGeneration", runner: str = "decision") -> Variant:
    asked = {"runner": runner, "trust_remote_code": True, "sets": [{"name": "Rows", "file": "rows.jsonl"}]}
    return Variant(
        path="/",
        label="Small",
        source=Reference(path="source"),
        base=Reference(path="base"),
        model_class=model_class,
        adapter=AdapterSettings.model_validate({**ADAPTER, "task_type": None}),
        verification=VerificationSettings.model_validate(asked),
    )


@pytest.fixture
def release(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    return tmp_path


def test_a_module_whose_processor_loads_passes(release: Path) -> None:
    (release / MODULE).write_text(ON_TOKENIZER)
    require_answering(variant(), release)
    assert not (release / "__pycache__").exists()


def test_a_processor_in_a_function_that_the_loading_calls_is_tried_too(release: Path) -> None:
    (release / MODULE).write_text(ON_TOKENIZER)
    (release / "tokenizer.json").write_text("{")
    with pytest.raises(VerificationError, match="AutoTokenizer does not load what source brings: "):
        require_answering(variant(), release)


def test_a_processor_that_needs_torchvision_says_how_to_install_it(
    release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("needs `torchvision` to be installed")

    if transformers.utils.is_torchvision_available():  # then the library itself would not refuse
        monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", refuse)
    (release / MODULE).write_text(ON_PROCESSOR)
    (release / "preprocessor_config.json").write_text(json.dumps(QWEN))
    with pytest.raises(VerificationError, match="AutoProcessor does not load what source brings: ValueError") as caught:
        require_answering(variant(), release)
    assert caught.value.next_step.startswith("pip install 'lora-publisher[vision]'")


@pytest.mark.parametrize(
    ("code", "found", "next_step"),
    [
        (
            "import no_such_package.inner",
            "ModuleNotFoundError: No module named 'no_such",
            "pip install no_such_package",
        ),
        ("raise SystemExit(3)", "SystemExit: 3", "correct what it names"),
        ("def load_release_model(:", "SyntaxError: ", "correct what it names"),
    ],
)
def test_whatever_the_module_raises_is_one_error_with_its_cause(
    code: str, found: str, next_step: str, release: Path
) -> None:
    (release / MODULE).write_text(code)
    with pytest.raises(VerificationError, match=f"{MODULE} of the source cannot be imported: {found}") as caught:
        require_answering(variant(), release)
    assert caught.value.next_step.startswith(next_step)


def test_the_runner_logits_is_refused_for_a_class_with_an_encoder_that_its_name_does_not_tell(release: Path) -> None:
    (release / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(VerificationError, match="T5ForConditionalGeneration is no such language model"):
        require_answering(variant("T5ForConditionalGeneration", "logits"), release)


@pytest.mark.parametrize("model_class", ["BertForSequenceClassification", "CLIPModel", "Wav2Vec2ForCTC"])
def test_the_runner_logits_is_refused_by_the_manifest_where_the_name_tells(model_class: str) -> None:
    with pytest.raises(ValueError, match=f"the token after a text, and {model_class} is no such language model"):
        variant(model_class, "logits")


@pytest.mark.parametrize("model_class", ["GPT2LMHeadModel", "LlamaForCausalLM", "Gemma3ForConditionalGeneration"])
def test_the_runner_logits_goes_with_a_language_model(model_class: str) -> None:
    assert variant(model_class, "logits").verification is not None
