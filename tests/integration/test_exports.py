"""The exports of a Llama's and of Qwen3.5's adapter: read as llama.cpp and mlx-lm read them, they are the adapter."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from publisher.adapters.exports import export_problems, peft_adapter, require_exportable, write_exports
from publisher.adapters.exports.llamacpp import Place, Swap, places
from publisher.audits import audit
from publisher.checkpoints.files import read_config
from publisher.errors import ExtractionError, PushError
from publisher.loaders import on_llama_cpp, on_mlx
from publisher.loaders.subject import Base, read_subject
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Variant
from publisher.pipeline.run import Run, run
from publisher.records.extraction import Extraction
from publisher.records.files import packaged_folder, sha256_of
from publisher.records.outcome import Outcome
from publisher.records.progress import silent
from tests.manifests import ADAPTER, one_variant

pytestmark = pytest.mark.usefixtures("quick_read_back")

FILES = ("adapter_model.gguf", "mlx/adapters.safetensors", "mlx/adapter_config.json")


class Case:
    """An adapter that was extracted with narrower modules, with its exports beside it."""

    def __init__(self, staged: Path, variant: Variant, *, base: Path, folder: Path) -> None:
        """`staged`: where it was extracted; `folder`: where it is copied to."""
        self.extraction = Extraction.read(staged / "extraction.json")
        self.folder, self.base = folder, base
        self.config = json.loads((base / "config.json").read_text())
        adapter = variant.adapter.model_copy(update={"exports": ("gguf", "mlx")})
        self.variant = variant.model_copy(update={"adapter": adapter})
        shutil.copytree(staged, folder, dirs_exist_ok=True)
        self.write()

    def write(self) -> None:
        """Both formats, from the adapter in the folder."""
        write_exports(
            self.variant.adapter.exports,
            self.extraction.modules,
            model_class=self.variant.model_class,
            folder=self.folder,
            config=self.config,
        )

    def problems(self) -> list[str]:
        """What of them is not the adapter."""
        modules = self.extraction.modules
        adapter = peft_adapter(self.variant.model_class, modules, folder=self.folder, config=self.config)
        return export_problems(self.variant.adapter.exports, self.folder, adapter=adapter)

    def places(self) -> dict[str, Place]:
        """Where llama.cpp has the modules."""
        shapes = {module.name: module.shape for module in self.extraction.modules}
        return places(self.variant.model_class, shapes, config=self.config)[0]

    @property
    def products(self) -> dict[str, Tensor]:
        """B A of each module; float64 has products and sums of bf16 numbers exactly, in whatever order."""
        found = load_file(self.folder / "adapter_model.safetensors")
        halves = {
            m.name: [found[f"base_model.model.{m.name}.lora_{half}.weight"].double() for half in "BA"]
            for m in self.extraction.modules
        }
        return {name: b @ a for name, (b, a) in halves.items()}


@pytest.fixture(params=["llama", "qwen3.5"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """The adapter of a pico Llama, or of the demo's smaller pair."""
    if request.param == "llama":
        release: Path = request.getfixturevalue("pico_release")
        (variant, _) = load_manifest(release / "manifest.yaml").variants
        return Case(release, variant, base=release.parents[1] / "pairs/base", folder=tmp_path / "staged")
    folder: Path = request.getfixturevalue("small_run")
    (_, variant) = load_manifest(packaged_folder("manifests") / "demo.yaml").variants
    return Case(
        folder / "dist/demo/clef-flash", variant, base=folder / "demo/clef-flash-base", folder=tmp_path / "staged"
    )


def test_a_gguf_gives_every_product_exactly_by_llama_cpps_names_order_and_scale(case: Case) -> None:
    reader = gguf.GGUFReader(case.folder / FILES[0])
    tensors = {t.name: torch.from_numpy(t.data.astype(np.float64)) for t in reader.tensors}
    alpha, there = value(reader, "adapter.lora.alpha"), case.places()
    assert tensors.keys() == {f"{place.name}.lora_{half}" for place in there.values() for half in "ab"}
    for name, product in case.products.items():
        a, b = (tensors[f"{there[name].name}.lora_{half}"] for half in "ab")
        # what llama.cpp's converter does to the weight; the unit tests hold it against the converter's by index
        swaps = there[name].rows, there[name].columns
        rows, columns = (order_of(swap, size) for swap, size in zip(swaps, product.shape, strict=True))
        assert torch.equal(alpha / b.shape[1] * (b @ a), product[rows][:, columns]), name


def order_of(swap: Swap | None, size: int) -> Tensor:
    numbers = torch.arange(size)
    return numbers if swap is None else swap(numbers[:, None])[:, 0]


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None
    return field.contents()


def test_the_verdicts_on_their_loaders_are_on_the_exports_where_they_are_there(case: Case) -> None:
    base = Base(case.base, case.variant.model_class)
    for judge, flag, export in (
        (on_llama_cpp.judge, "--lora adapter_model.gguf", FILES[0]),
        (on_mlx.judge, "--adapter-path mlx", FILES[1]),
    ):
        found = judge(read_subject(case.folder, base))
        assert (found.loads, found.scale, found.flags) == ("yes", "right", (flag,))
        (case.folder / export).unlink()
        assert judge(read_subject(case.folder, base)).flags != (flag,)


def test_a_gguf_says_what_it_is(case: Case) -> None:
    reader = gguf.GGUFReader(case.folder / FILES[0])
    architecture = "llama" if "Llama" in case.variant.model_class else "qwen35"
    found = [value(reader, key) for key in ("general.type", "general.architecture", "adapter.type")]
    assert found == ["adapter", architecture, "lora"]
    assert value(reader, "adapter.lora.alpha") == case.extraction.summary.rank


def test_mlx_gives_every_product_exactly_by_its_own_names_and_scale(case: Case) -> None:
    config = json.loads((case.folder / FILES[2]).read_text())
    tensors = load_file(case.folder / FILES[1])
    parameters = config["lora_parameters"]
    for name, product in case.products.items():
        renamed = name.replace("model.language_model.", "language_model.model.")
        a, b = (tensors.pop(f"{renamed}.lora_{half}").double() for half in "ab")
        assert a.shape[1] == b.shape[0] == parameters["rank"]
        assert torch.equal(parameters["scale"] * (a @ b).T, product)
        assert name.partition(".layers.")[2].partition(".")[2] in parameters["keys"]
    assert not tensors
    assert config["num_layers"] == case.extraction.summary.layers_total
    assert config["fine_tune_type"] == "lora"


def test_the_same_adapter_gives_the_same_bytes(case: Case) -> None:
    before = [sha256_of(case.folder / name) for name in FILES]
    for name in FILES:
        (case.folder / name).unlink()
    case.write()
    assert [sha256_of(case.folder / name) for name in FILES] == before


def test_one_bit_of_a_gguf_is_seen_and_its_module_named(case: Case) -> None:
    name = case.extraction.modules[0].name
    reader, place = gguf.GGUFReader(case.folder / FILES[0], "r+"), case.places()[name]
    (tensor,) = (one for one in reader.tensors if one.name == f"{place.name}.lora_b")
    tensor.data[-1, 0] = np.nextafter(tensor.data[-1, 0], np.float32(9))
    reader.data.flush()
    assert case.problems() == [f"gguf: {name}: B A is not the adapter's"]


def test_another_alpha_in_a_gguf_is_seen(case: Case) -> None:
    reader = gguf.GGUFReader(case.folder / FILES[0], "r+")
    field = reader.get_field("adapter.lora.alpha")
    assert field is not None
    field.parts[-1][0] *= 2
    reader.data.flush()
    assert all("is no scale of 1" in line for line in case.problems())
    assert len(case.problems()) == len(case.extraction.modules)


def test_a_change_in_mlx_is_seen(case: Case) -> None:
    tensors = load_file(case.folder / FILES[1])
    name = min(tensors)
    save_file({**tensors, name: tensors[name] * 2}, case.folder / FILES[1], metadata={"format": "pt"})
    config = json.loads((case.folder / FILES[2]).read_text())
    config["lora_parameters"]["scale"] = 2.0
    (case.folder / FILES[2]).write_text(json.dumps(config))
    told = ["mlx: mlx/adapter_config.json is not that of these modules, at a scale of 1"]
    assert case.problems() == [*told, f"mlx: {name} is not the adapter's"]


# --- in a run -----------------------------------------------------------------------------------------------


@pytest.fixture
def pico(pico_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the pico pairs and a manifest that asks for both formats."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs").symlink_to(pico_pairs)
    ask_for("gguf", "mlx")
    return tmp_path


def ask_for(*exports: str) -> None:
    adapter = {**ADAPTER, "dtype": "bfloat16", "exports": list(exports)}
    card = {"title": "Pico", "summary": "One adapter."}
    text = one_variant("o/pico", label="Pico", source="pairs/one", base="pairs/base", card=card, adapter=adapter)
    Path("pico.yaml").write_text(text, encoding="utf-8")


def ran(**options: Any) -> Outcome:
    return run(Run(Path("pico.yaml"), Path("dist"), device="cpu", **options), silent)


def failures() -> Mapping[str, str]:
    found = audit("dist/pico", deep=False, work=Path("work"), device="cpu", progress=silent)
    return {check.name: check.detail for check in found.failed}


def spoil_gguf() -> None:
    reader = gguf.GGUFReader("dist/pico/adapter_model.gguf", "r+")
    reader.tensors[-1].data[0, 0] += 1
    reader.data.flush()


@pytest.mark.usefixtures("pico")
def test_exports_are_part_of_the_release_from_staging_to_read_back() -> None:
    outcome = ran(rehearse=True)
    assert outcome.push is not None
    assert outcome.push.read_back is not None
    staged = {p.relative_to("dist/pico").as_posix() for p in Path("dist/pico").rglob("*") if p.is_file()}
    assert set(FILES) <= staged
    assert outcome.push.read_back.files == len(staged)
    recorded = Extraction.read(Path("dist/pico/extraction.json")).summary.exports
    assert [file.name for file in recorded] == list(FILES)
    card = Path("dist/pico/README.md").read_text(encoding="utf-8")
    assert "--lora adapter/adapter_model.gguf" in card
    assert "--adapter-path adapter/mlx" in card
    assert failures() == {}
    assert ran(dry_run=True).variants[0].reused == ("extract", "validate", "loaders")


@pytest.mark.usefixtures("pico")
def test_an_export_that_was_changed_is_seen_by_the_audit_and_not_pushed() -> None:
    ran(dry_run=True)
    spoil_gguf()
    found = failures()
    assert found.keys() == {"digests", "exports"}
    assert "B A is not the adapter's" in found["exports"]
    with pytest.raises(PushError, match="has not passed validation as it is now"):
        ran(first="push", last="push", rehearse=True)


@pytest.mark.usefixtures("pico")
def test_exports_that_are_not_asked_for_any_more_go_and_nothing_is_extracted_again() -> None:
    ran(last="extract")
    kept = {file: file.stat().st_mtime_ns for file in Path("dist/pico.work").rglob("*.safetensors")}
    ask_for("mlx")
    ran(last="extract")
    assert [Path("dist/pico", name).exists() for name in FILES] == [False, True, True]
    ask_for()
    ran(last="extract")
    assert [Path("dist/pico", name).exists() for name in FILES] == [False, False, False]
    assert {file: file.stat().st_mtime_ns for file in Path("dist/pico.work").rglob("*.safetensors")} == kept


def test_a_module_without_a_place_is_refused_by_its_name(pico_pairs: Path) -> None:
    config = read_config(pico_pairs / "base")
    with pytest.raises(ExtractionError, match=r"model\.vision: llama\.cpp keeps vision in a file of its own"):
        require_exportable(("gguf",), "LlamaForCausalLM", shapes={"model.vision": (64, 48)}, config=config)
