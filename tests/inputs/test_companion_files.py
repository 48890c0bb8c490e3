"""What lies beside the weights goes along into a merged checkpoint, so that the base's own loader loads it."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub import HfApi, constants

from publisher.adapters.loading import quiet
from publisher.checkpoints.companion_files import going_along, module_folders
from publisher.errors import FetchError
from publisher.hub.local import LocalHub
from publisher.manifest.new import new_manifest
from publisher.pipeline.merge import Request, merge
from publisher.pipeline.run import Run, run
from publisher.records.progress import silent
from tests.inputs.classes import CASES
from tests.inputs.pairs import Pair, tune

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]
BESIDE = {
    "modules.json": json.dumps(MODULES),
    "sentence_bert_config.json": "{}",
    "tokenizer.json": "{}",
    "chat_templates/tool.jinja": "{{ messages }}",
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "weights of a module of its own",
    "2_Dense/pytorch_model.bin": "the same as a pickle",
}
STAYING = {
    "README.md": "# The base",
    "pytorch_model.bin": "the base's weights in another format",
    "onnx/model.onnx": "the same once more",
    "onnx/config.json": "{}",
    ".hidden/lock": "",
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A sentence-transformers repository and a fine-tune of it, in the working folder."""
    monkeypatch.chdir(tmp_path)
    found = Pair(tmp_path, "BertModel")
    model = transformers.BertModel(transformers.BertConfig(**CASES["BERT"].config)).bfloat16()
    with quiet():
        for side in (found.base, found.source):
            model.save_pretrained(side)
    found.change(lambda weights: tune(weights, CASES["BERT"].pattern))
    write(found.base, BESIDE | STAYING)
    return found


def merged(manifest: str) -> set[str]:
    """The files that lie beside the weights of the merged checkpoint."""
    Path("m.yaml").write_text(manifest)
    run(Run(Path("m.yaml"), Path("dist"), device="cpu", last="extract"), silent)
    merge(Request(Path("m.yaml"), Path("dist"), None, Path("merged")), silent)
    files = {path.relative_to("merged").as_posix() for path in Path("merged").rglob("*") if path.is_file()}
    return files - {"config.json", "model.safetensors"}


@pytest.mark.usefixtures("pair")
def test_a_merge_keeps_all_that_a_sentence_transformer_is_made_of() -> None:
    assert merged(new_manifest(base="base", tuned="source")) == BESIDE.keys()
    for name, text in BESIDE.items():
        assert Path("merged", name).read_text() == text


def test_of_a_base_on_the_hub_too(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalHub(tmp_path / "data") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        url = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", hub.token)
        api = HfApi()
        api.create_repo("o/base")
        api.upload_folder(repo_id="o/base", folder_path=pair.base, ignore_patterns=["README.md"])
        assert merged(new_manifest(base="o/base", tuned="source")) == BESIDE.keys()


def test_weights_in_other_formats_and_hidden_files_stay_behind() -> None:
    assert going_along([*BESIDE, *STAYING], {"1_Pooling", "2_Dense"}) == sorted([*BESIDE, "README.md"])


@pytest.mark.parametrize("path", ["../outside", "/etc", "a/../../b", "a//b"])
def test_a_module_outside_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": path}]))
    with pytest.raises(FetchError, match="does not name the folders of further modules"):
        module_folders(tmp_path / "modules.json")


@pytest.mark.parametrize("content", [[], {}, [1], [{"path": ""}], [{"path": None}]])
def test_a_file_that_names_no_folder_names_none(tmp_path: Path, content: Any) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(content))
    assert module_folders(tmp_path / "modules.json") == frozenset()
