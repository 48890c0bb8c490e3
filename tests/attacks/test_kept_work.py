"""Names of tensors become no paths, and whatever is kept is taken only as it was written."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from publisher.adapters.peft_files import Factors
from publisher.errors import ExtractionError, PublisherError, VerificationError
from publisher.extraction.module_cache import ModuleCache
from publisher.manifest.reading import load_manifest
from publisher.pipeline.markers import lapse_of, mark
from publisher.pipeline.run import Run, run
from publisher.pipeline.sites import VariantSite
from publisher.records.progress import silent
from publisher.records.sealed import kept_file
from publisher.verification.answer_log import Answer, AnswerLog
from tests.factories import module

NAMES = {
    "upwards": "../../x",
    "absolute": "/abs/x",
    "backslashes": "a\\..\\b",
    "4,000 characters": "x" * 4000,
    "NUL": "a\0b",
    "a device": "CON",
    "upper case": "Model.Layer",
    "lower case": "model.layer",
    "nothing": "",
    "a dot": ".",
    "two dots": "..",
    "a drive": "C:\\x",
    "a line feed": "a\nb",
    "one letter": "é",
    "the letter and its accent": "e\u0301",
    "hidden": ".x.partial",
}
PATHS = ("/", "root/", "hub/", "Hub/", "lock/", "digests.json/", "variants/", "variants/root/", "a/")
NO_NAMES = {"4,000 characters", "NUL", "nothing", "a line feed"}  # no record of a module holds one
BATCHES: list[list[list[Answer]]] = [
    [[np.array([0.5, -1.0], dtype=np.float32)], ["ValueError: too long"]],
    [[np.array([2.0, 3.5], dtype=np.float32)]],
    [[np.array([0.25], dtype=np.float32)]],
]


def made(name: str, value: float = 1.0) -> Factors:
    figures = module(name, rank=1, shape=(4, 3), sigma_1=value, sigma_r=value)
    return Factors(torch.full((4, 1), value), torch.full((1, 3), value), figures)


def everything(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(NO_NAMES))
def test_a_module_has_no_such_name(kind: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        made(NAMES[kind])


@pytest.mark.parametrize("name", [name for kind, name in NAMES.items() if kind not in NO_NAMES])
def test_a_module_of_this_name_is_kept_inside_its_folder_and_comes_back(tmp_path: Path, name: str) -> None:
    shelf = ModuleCache(tmp_path / "deep" / "work" / "modules", "key")
    shelf.put(made(name))
    found = shelf.figures(name)
    assert found is not None
    assert found.name == name
    assert torch.equal(shelf.factors(found).a, torch.ones(1, 3))
    assert {file.parent for file in everything(tmp_path)} == {shelf.folder}
    assert {len(file.stem) for file in everything(tmp_path)} == {64}


def test_no_two_names_have_one_file_not_even_where_case_does_not_count(tmp_path: Path) -> None:
    files = {kept_file(tmp_path, name, suffix=".json").name.casefold() for name in NAMES.values()}
    assert len(files) == len(NAMES)


@pytest.mark.parametrize("name", ["../../victim/config", "{here}/victim/config", "a\\b/victim/config", "Victim/config"])
def test_an_extraction_with_such_a_tensor_writes_no_file_outside_its_output(own_tiny_run: Path, name: str) -> None:
    victim = own_tiny_run / "victim"
    victim.mkdir()
    for suffix in (".json", ".safetensors"):
        (victim / f"config{suffix}").write_text("mine")
    for side in ("src", "base"):
        file = own_tiny_run / side / "model.safetensors"
        tensors = load_file(file)
        tensors[f"{name.format(here=own_tiny_run)}.weight"] = tensors.pop("model.layers.0.mlp.down_proj.weight")
        save_file(tensors, file, metadata={"format": "pt"})
    before = {file: file.read_bytes() for file in everything(own_tiny_run) if own_tiny_run / "dist" not in file.parents}
    with pytest.raises(PublisherError):  # PEFT has no such module, or the name is refused before
        run(Run(Path("m.yaml"), Path("dist"), device="cpu", dry_run=True, last="validate"), silent)
    after = {file: file.read_bytes() for file in everything(own_tiny_run) if own_tiny_run / "dist" not in file.parents}
    assert after == before


def test_no_variants_work_lies_where_this_tool_or_another_variant_keeps_its_own(tiny_run: Path) -> None:
    manifest = load_manifest(tiny_run / "m.yaml")
    variants = {path: manifest.variants[0].model_copy(update={"path": path}) for path in PATHS}
    options = Run(tiny_run / "m.yaml", Path("dist"))
    work = [VariantSite(options, manifest, silent, one).kept("x") for one in variants.values()]
    top = [folder.relative_to(options.work).parts[0].casefold() for folder in work]
    assert len(set(work)) == len(PATHS)
    assert set(top) == {"root", "variants", "a"}
    assert top.count("root") == 1


# --- kept modules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_flipped_bit_in_any_octet_of_a_kept_module_makes_it_count_as_not_finished(
    tmp_path: Path, suffix: str
) -> None:
    shelf = ModuleCache(tmp_path, "key")
    shelf.put(made("m"))
    file = kept_file(tmp_path, "m", suffix=suffix)
    content = file.read_bytes()
    for bit in (8 * octet + octet % 8 for octet in range(len(content))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        assert shelf.figures("m") is None, f"bit {bit}"
    file.write_bytes(content)
    assert shelf.figures("m") is not None


def test_a_module_kept_for_other_inputs_or_under_another_name_is_not_taken(tmp_path: Path) -> None:
    shelf = ModuleCache(tmp_path, "key")
    shelf.put(made("m"))
    assert ModuleCache(tmp_path, "another key").figures("m") is None
    for suffix in (".json", ".safetensors"):
        kept_file(tmp_path, "n", suffix=suffix).write_bytes(kept_file(tmp_path, "m", suffix=suffix).read_bytes())
    assert shelf.figures("n") is None


def test_factors_that_change_after_their_figures_were_read_are_refused_with_what_to_do(tmp_path: Path) -> None:
    shelf = ModuleCache(tmp_path, "key")
    shelf.put(made("m"))
    figures = shelf.figures("m")
    assert figures is not None
    file = kept_file(tmp_path, "m", suffix=".safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ExtractionError, match=r"kept of m in .* was changed while .* run the same command again"):
        shelf.factors(figures)


@pytest.mark.parametrize("left", [0, 1, 100])
def test_half_written_figures_are_as_good_as_none(tmp_path: Path, left: int) -> None:
    shelf = ModuleCache(tmp_path, "key")
    shelf.put(made("m"))
    file = kept_file(tmp_path, "m", suffix=".json")
    file.write_bytes(file.read_bytes()[:left])
    assert shelf.figures("m") is None
    assert shelf.has_files_of("m")


# --- markers ------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_octet_of_a_marker_makes_its_stage_run_again(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    marker = tmp_path / "marker.json"
    mark(marker, "key", folder=tmp_path, files=[tmp_path / "result.json"])
    content = marker.read_bytes()
    for bit in (8 * octet + octet % 8 for octet in range(len(content))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        marker.write_bytes(flipped)
        assert lapse_of(marker, "key", folder=tmp_path) == f"{marker} is damaged"
    marker.write_bytes(content)
    assert lapse_of(marker, "key", folder=tmp_path) == ""


# --- answers ------------------------------------------------------------------------------------------------


def kept_answers(folder: Path, key: str = "key") -> AnswerLog:
    answers = AnswerLog(folder, key)
    for place, batch in enumerate(BATCHES):
        answers.add(batch, number=place)
    return answers


def test_a_flipped_bit_in_any_octet_of_the_answers_drops_the_lines_that_it_touches_and_no_other(tmp_path: Path) -> None:
    answers = kept_answers(tmp_path)
    content = answers.file.read_bytes()
    ends = [place for place, octet in enumerate(content) if octet == ord("\n")]
    for bit in (8 * octet + octet % 8 for octet in range(len(content))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        answers.file.write_bytes(flipped)
        touched = {sum(end < bit // 8 for end in ends)}
        touched |= {place + 1 for place in touched if bit // 8 in ends and place + 1 < len(BATCHES)}  # they are one now
        assert answers.finished() == set(range(len(BATCHES))) - touched, f"bit {bit}"
        for place in sorted(touched):
            answers.add(BATCHES[place], number=place)
        assert sorted(answers.file.read_bytes().splitlines()) == sorted(content.splitlines())


def test_a_line_of_other_answers_or_of_another_place_is_dropped(tmp_path: Path) -> None:
    answers = kept_answers(tmp_path)
    foreign = kept_answers(tmp_path, "other").file.read_bytes().splitlines(keepends=True)
    lines = answers.file.read_bytes().splitlines(keepends=True)
    moved = lines[2].replace(b'{"batch":2', b'{"batch":1')
    answers.file.write_bytes(lines[0] + foreign[1] + moved + lines[2])
    assert answers.mend() == 2
    assert answers.finished() == {0, 2}


def test_answers_that_change_after_they_were_checked_are_refused_with_what_to_do(tmp_path: Path) -> None:
    answers = kept_answers(tmp_path)
    assert answers.finished() == {0, 1, 2}
    content = bytearray(answers.file.read_bytes())
    content[40] ^= 1
    answers.file.write_bytes(content)
    with pytest.raises(VerificationError, match=r"was changed while .* run the same command again"):
        list(answers.read())


def test_the_name_of_a_kept_file_is_the_digest_of_what_it_is_about(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"model.layers.0.q_proj").hexdigest()
    assert kept_file(tmp_path, "model.layers.0.q_proj", suffix=".json") == tmp_path / f"{digest}.json"
