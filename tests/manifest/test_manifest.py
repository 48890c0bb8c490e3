"""What a manifest may say, and what its author reads when it says something else.

Each file of tests/manifests_bad has one fault (five_faults.yaml has five); the .txt beside it is what the user gets.
"""

import re
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from publisher.errors import ManifestError
from publisher.manifest.reading import load_manifest, parse_manifest, read_manifest
from publisher.manifest.schema import Manifest
from publisher.records.files import canonical_json

ROOT = Path(__file__).parents[2]
BAD = sorted((ROOT / "tests/manifests_bad").glob("*.yaml"))
GOOD = sorted((ROOT / "manifests").glob("*.yaml"))
CLEF = (ROOT / "manifests/clef.yaml").read_text(encoding="utf-8")
SOURCE_PIN = "ed3eed331870db2eff4b0db01237128ede8a00ce"

words = st.text(st.sampled_from(string.ascii_letters + "._-/~ \\:é\n"), max_size=12)


def with_value(value: object, *keys: str | int) -> str:
    """The Clef manifest as YAML with one value put in another's place."""
    data = yaml.safe_load(CLEF)
    holder = data
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    return yaml.safe_dump(data)


def complaints(text: str) -> list[str]:
    return [f"{problem.field}: {problem.what}" for problem in parse_manifest(Path("m.yaml"), text)[1]]


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_a_broken_manifest_gets_these_messages(file: Path, golden: Callable[[Path, str], None]) -> None:
    manifest, problems = read_manifest(file)
    assert manifest is None
    golden(file.with_suffix(".txt"), "".join(f"{problem}\n" for problem in problems).replace(f"{file.parent}/", ""))


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_one_fault_is_one_message_with_file_and_what_to_do(file: Path) -> None:
    problems = read_manifest(file)[1]
    assert len(problems) == (5 if file.stem == "five_faults" else 1)
    assert all(str(problem).startswith(f"{file}: ") and ("; " in problem.what) for problem in problems)
    assert all("\n" not in str(problem) for problem in problems)


def test_every_broken_manifest_has_its_message_and_no_message_lacks_its_manifest() -> None:
    assert [file.stem for file in BAD] == sorted(file.stem for file in (ROOT / "tests/manifests_bad").glob("*.txt"))


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.stem)
def test_the_manifests_of_this_repository_are_sound(file: Path) -> None:
    assert read_manifest(file)[1] == ()


def test_only_hub_references_make_a_manifest_that_others_can_check() -> None:
    assert not load_manifest(ROOT / "manifests/clef.yaml").is_local
    assert load_manifest(ROOT / "manifests/demo.yaml").is_local


def test_the_error_of_a_manifest_names_the_count_and_each_problem() -> None:
    with pytest.raises(ManifestError, match="5 problems") as caught:
        load_manifest(ROOT / "tests/manifests_bad/five_faults.yaml")
    assert caught.value.exit_code == 2
    assert str(caught.value).count("five_faults.yaml: ") == 5


def test_an_unknown_version_is_the_only_thing_said_of_a_file() -> None:
    assert complaints("version: 7\nversion: 7\nnonsense: 1\n") == [
        "version: is 7, and this publisher reads version 1; install a newer publisher"
    ]


def test_a_file_that_is_not_there_says_how_to_write_one(tmp_path: Path) -> None:
    assert [problem.what for problem in read_manifest(tmp_path / "none.yaml")[1]] == [
        "no such file; write one with: publish new --source A --base B"
    ]


def test_a_folder_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("title: é".encode("latin-1"))
    assert "is not text in UTF-8" in str(read_manifest(tmp_path / "latin.yaml")[1][0])
    assert "it is a folder, not a file" in str(read_manifest(tmp_path)[1][0])


def test_line_ends_and_a_byte_order_mark_do_not_matter() -> None:
    assert complaints(CLEF.replace("\n", "\r\n")) == []
    assert complaints("\ufeff" + CLEF) == []


def test_a_duplicate_key_is_found_in_any_depth_and_once_under_an_alias() -> None:
    text = CLEF.replace("source:", "source: &s", 1).replace("    base:\n", "    base: *s\n    spare:\n", 1)
    doubled = text.replace(f"revision: {SOURCE_PIN}", f"revision: {SOURCE_PIN}\n      revision: main")
    twice = [line for line in complaints(doubled) if "twice" in line]
    assert twice == ["variants[0].source.revision: stands twice, on line 11 again; keep one"]


def test_a_key_that_a_merge_brings_may_be_written_over() -> None:
    start, end = CLEF.index("    base:"), CLEF.index("    model_class")
    merged = "    base: {<<: *s, repo: Qwen/Qwen3.8-27B}\n"
    assert complaints(CLEF[:start].replace("source:", "source: &s") + merged + CLEF[end:]) == []


def test_a_manifest_that_loops_through_its_aliases_is_refused() -> None:
    assert complaints("variants: &v [*v]") == [
        ": is not YAML: is an alias into itself; write it out (line 1, column 15); correct that line"
    ]


@given(st.text("0123456789abcdef", min_size=40, max_size=40))
def test_any_full_commit_id_is_accepted(commit: str) -> None:
    assert complaints(with_value(commit, "variants", 0, "source", "revision")) == []


@given(st.text("0123456789abcdef", max_size=60).filter(lambda text: len(text) != 40))
def test_a_commit_id_of_any_other_length_is_refused(commit: str) -> None:
    (complaint,) = complaints(with_value(commit, "variants", 0, "base", "revision"))
    assert complaint.startswith("variants[0].base.revision: ")


@given(st.one_of(words, st.lists(st.sampled_from(["..", ".", "", "a", "A.b", "README.md"])).map("/".join)))
def test_any_accepted_variant_path_stays_inside_the_repository(path: str) -> None:
    manifest, problems = parse_manifest(Path("m.yaml"), with_value(path, "variants", 0, "path"))
    assert (manifest is None) == bool(problems)
    if manifest is not None:
        root = Path("/repository")
        joined = (root / manifest.variants[0].folder).resolve()
        assert joined.is_relative_to(root)
        assert (joined == root) == (path == "/")
        assert joined.relative_to(root).as_posix() == (manifest.variants[0].folder or ".")


@given(words)
def test_any_accepted_local_path_is_relative(path: str) -> None:
    manifest, _ = parse_manifest(Path("m.yaml"), with_value({"path": path}, "variants", 0, "source"))
    if manifest is not None:
        assert not Path(path).is_absolute()
        assert not path.startswith("~")


@given(st.integers(1, 4096))
def test_any_whole_number_above_zero_is_a_rank(rank: int) -> None:
    assert complaints(with_value(rank, "variants", 0, "adapter", "rank")) == []


@pytest.mark.parametrize("rank", [0, -1, True, 1.5, "16", "Auto", None, [16]])
def test_nothing_else_but_auto_is_a_rank(rank: object) -> None:
    assert len(complaints(with_value(rank, "variants", 0, "adapter", "rank"))) == 1


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_range_of_layers_runs_upwards(first: int, last: int) -> None:
    wrong = complaints(with_value(f"{first}-{last}", "variants", 0, "expect", "layers"))
    assert bool(wrong) == (last <= first)


@pytest.mark.parametrize(("written", "read"), [(7, "7"), ("0-3,7", "0-3, 7"), ("3, 7, 11-12", "3, 7, 11-12")])
def test_layers_are_read_as_extraction_writes_them(written: object, read: str) -> None:
    manifest, _ = parse_manifest(Path("m.yaml"), with_value(written, "variants", 0, "expect", "layers"))
    assert manifest is not None
    assert manifest.variants[0].expect.layers == read


@given(st.one_of(st.text(max_size=60), st.text("{}[]&*!?:-,#|>'\"%@ \na1", max_size=40)))
def test_any_text_at_all_yields_problems_and_never_an_exception(text: str) -> None:
    manifest, problems = parse_manifest(Path("m.yaml"), text)
    assert manifest is None
    assert problems


@pytest.mark.parametrize("value", ["!!bool maybe", "!!timestamp noon", "!!int x", "0x_", "2026-02-30", "!!set {a}"])
def test_values_that_trip_the_yaml_reader_are_problems_too(value: str) -> None:
    assert len(complaints(CLEF.replace("title: clef-lora", f"title: {value}"))) == 1


def test_the_json_schema_for_editors_is_not_stale(golden: Callable[[Path, str], None]) -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}
    golden(ROOT / "schemas/manifest.schema.json", canonical_json(schema))


def test_every_field_tells_an_editor_what_it_is() -> None:
    schema = Manifest.model_json_schema()
    described = {
        f"{model['title']}.{name}": bool(field.get("description") or field.get("$ref"))
        for model in (schema, *schema["$defs"].values())
        for name, field in model["properties"].items()
    }
    assert [name for name, is_described in described.items() if not is_described] == []


def whole_manifests(document: Path) -> list[str]:
    blocks = re.findall(r"^```yaml\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if re.search(r"^version:", block, re.MULTILINE)]


def test_every_whole_manifest_in_the_documentation_is_sound() -> None:
    found = [text for document in (ROOT / "docs").glob("*.md") for text in whole_manifests(document)]
    assert found
    assert [complaints(text) for text in found] == [[]] * len(found)


def test_the_documentation_names_every_field_and_every_choice() -> None:
    text = (ROOT / "docs/manifest.md").read_text(encoding="utf-8")
    schema = Manifest.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    fields = {name for model in models for name in model["properties"]}
    choices = {choice for model in models for field in model["properties"].values() for choice in field.get("enum", [])}
    choices = {"null" if choice is None else choice for choice in choices}
    assert [word for word in sorted(fields | choices) if f"`{word}`" not in text] == []
