"""The table of vLLM's architectures follows from the sources in a wheel, by what a class inherits from anywhere."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from publisher.loaders import on_vllm, vllm_models
from tests.make_vllm_models import Sources, module_text

MODELS = "vllm/model_executor/models"
WHEEL = {
    f"{MODELS}/registry.py": """
_TEXT = {
    "PlainForCausalLM": ("plain", "PlainForCausalLM"),
    "DirectForCausalLM": ("direct", "DirectForCausalLM"),
    "ChildForCausalLM": ("child", "ChildForCausalLM"),
    "RenamedForCausalLM": ("child", "ChildForCausalLM"),
    "UnheardOfForCausalLM": ("plain", "PlainForCausalLM"),
}
_SHARED = {"FarForCausalLM": ("vllm.models.far", "FarForCausalLM"), **{k: v for k, v in _TEXT.items()}}
_UNUSED = {"OldForCausalLM": ("plain", "PlainForCausalLM")}
_VLLM_MODELS = {**_TEXT, **_SHARED}
""",
    f"{MODELS}/interfaces.py": "class SupportsLoRA: ...",
    f"{MODELS}/plain.py": "class PlainForCausalLM(nn.Module): ...",
    f"{MODELS}/direct.py": "from .interfaces import SupportsLoRA\nclass DirectForCausalLM(SupportsLoRA): ...",
    f"{MODELS}/child.py": "from .direct import DirectForCausalLM as Parent\nclass ChildForCausalLM(Parent): ...",
    "vllm/models/far/__init__.py": """
if current_platform.is_rocm():
    from .amd.model import FarForCausalLM
else:
    from .nvidia.model import FarForCausalLM
""",
    "vllm/models/far/amd/model.py": "class FarForCausalLM(nn.Module): ...",
    "vllm/models/far/nvidia/model.py": """
from vllm.model_executor.models.interfaces import SupportsLoRA
class FarForCausalLM(nn.Module, SupportsLoRA): ...
""",
}
KNOWN = ("PlainForCausalLM", "DirectForCausalLM", "ChildForCausalLM", "RenamedForCausalLM", "FarForCausalLM", "Other")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    file = tmp_path / "vllm-9.8.7-cp38-abi3-manylinux_2_28_x86_64.whl"
    with ZipFile(file, "w") as archive:
        for name, text in WHEEL.items():
            archive.writestr(name, text)
    return file


@pytest.mark.parametrize(
    ("architecture", "served"),
    [
        ("PlainForCausalLM", False),
        ("DirectForCausalLM", True),
        ("ChildForCausalLM", True),
        ("RenamedForCausalLM", True),
        ("FarForCausalLM", True),
    ],
)
def test_a_class_is_served_with_lora_whose_bases_say_so_in_whatever_module(
    wheel: Path, architecture: str, served: bool
) -> None:
    sources = Sources(wheel)
    assert sources.serves_with_lora(*sources.architectures()[architecture]) is served


def test_the_module_that_is_written_holds_what_transformers_knows_and_the_version(wheel: Path) -> None:
    written: dict[str, object] = {}
    exec(module_text(wheel, KNOWN), written)  # noqa: S102 - the text of a Python module, as it is imported
    assert written["VERSION"] == "9.8.7"
    assert written["WITH_LORA"] == {"DirectForCausalLM", "ChildForCausalLM", "RenamedForCausalLM", "FarForCausalLM"}
    assert written["WITHOUT_LORA"] == {"PlainForCausalLM"}


def test_the_table_and_the_rules_were_read_in_one_version_of_vllm() -> None:
    assert vllm_models.VERSION == on_vllm.READ


@pytest.mark.parametrize("architecture", ["PhiForCausalLM", "Olmo2ForCausalLM", "GPTNeoXForCausalLM"])
def test_what_vllm_runs_by_its_transformers_backend_is_served_with_lora(architecture: str) -> None:
    assert architecture in vllm_models.WITH_LORA
    assert architecture not in vllm_models.WITHOUT_LORA
