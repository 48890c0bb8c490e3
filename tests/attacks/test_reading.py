"""What is read of a foreign folder: regular files of bounded size, and documents that stay within the limits."""

import json
import os
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.audits import audit
from publisher.border.files import UnreadableError, entries, open_regular, read_regular, regular_files
from publisher.border.json_text import parse_json
from publisher.border.limits import LIMITS
from publisher.border.names import tensor_name
from publisher.border.paths import repository_path
from publisher.border.safetensors_header import parse_header
from publisher.border.yaml_text import parse_yaml
from publisher.checkpoints.files import read_json
from publisher.checkpoints.headers import file_headers, read_headers
from publisher.errors import FetchError
from publisher.manifest.reading import read_manifest
from publisher.records.audit import Audit
from publisher.records.checkpoint import FileDigest
from publisher.records.files import canonical_json
from publisher.records.progress import silent
from publisher.release.evidence import read_release


def audited(folder: Path) -> Audit:
    return audit(str(folder), deep=False, work=folder.parent / "work", device="cpu", progress=silent)


def details(found: Audit, name: str) -> str:
    return next(check.detail for check in found.checks if check.name == name)


# --- files --------------------------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()
    (path / "README.md").write_text("# inside")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is bounded
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


@pytest.mark.parametrize(
    ("make", "words"),
    [(fifo, "it is a FIFO"), (device, "it is a device"), (folder, "it is a folder"), (listening, "it is a socket")],
)
def test_what_is_no_regular_file_is_never_opened(tmp_path: Path, make: object, words: str) -> None:
    assert callable(make)
    make(tmp_path / "x")
    with pytest.raises(UnreadableError, match=words):
        open_regular(tmp_path / "x")


def test_a_file_is_read_up_to_its_bound_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_regular(tmp_path / "x", limit=5) == b"12345"
    with pytest.raises(UnreadableError, match="more than the 4 bytes"):
        read_regular(tmp_path / "x", limit=4)


def test_a_sparse_terabyte_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FetchError, match="has more than the"):
        read_json(tmp_path / "x.json")


def test_links_of_a_foreign_folder_are_told_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").symlink_to(tmp_path / "secret")
    (tmp_path / "there" / "b").symlink_to(tmp_path)
    (tmp_path / "there" / "c").write_text("its own")
    assert {path.name: kind for path, kind in entries(tmp_path / "there")} == {
        "a": "a link",
        "b": "a link",
        "c": "a file",
    }
    assert [path.name for path in regular_files(tmp_path / "there")] == ["c"]


def test_a_snapshot_of_the_clients_cache_is_made_of_files(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0abc").write_text("content")
    snapshot = tmp_path / "snapshots" / "commit"
    (snapshot / "flash").mkdir(parents=True)
    (snapshot / "a").symlink_to("../../blobs/0abc")
    (snapshot / "flash" / "b").symlink_to("../../../blobs/0abc")
    (snapshot / "c").symlink_to("../../blobs/../../etc/passwd")
    assert [path.name for path in regular_files(snapshot)] == ["a", "b"]


def test_a_large_file_that_the_cache_keeps_once_for_all_repositories_is_a_file(tmp_path: Path) -> None:
    for folder in ("blobs/ab", "models--o--r/blobs", "models--o--r/snapshots/c0ffee"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "blobs/ab/abcd").write_text("content")
    (tmp_path / "outside").write_text("a secret")
    (tmp_path / "models--o--r/blobs/large").symlink_to("../../blobs/ab/abcd")
    (tmp_path / "models--o--r/blobs/elsewhere").symlink_to("../../outside")
    (tmp_path / "models--o--r/blobs/further").symlink_to("../../blobs/ab/link")
    (tmp_path / "blobs/ab/link").symlink_to("../../outside")
    snapshot = tmp_path / "models--o--r/snapshots/c0ffee"
    for name in ("large", "elsewhere", "further"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert [path.name for path in regular_files(snapshot)] == ["large"]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "extraction.json", "README.md"])
@pytest.mark.parametrize("make", [fifo, device, folder], ids=["fifo", "device", "folder"])
def test_an_audit_ends_and_names_what_is_no_file(own_tiny_run: Path, name: str, make: object) -> None:
    release = own_tiny_run / "dist" / "m"
    (release / name).unlink()
    assert callable(make)
    make(release / name)
    found = audited(release)
    assert "files" in {check.name for check in found.failed}
    assert f"{name} is" in details(found, "files")


def test_a_readme_that_is_a_link_is_not_shown(own_tiny_run: Path) -> None:
    release = own_tiny_run / "dist" / "m"
    (own_tiny_run / "private").write_text("root:x:0:0:private words\n" * 3)
    (release / "README.md").unlink()
    (release / "README.md").symlink_to(own_tiny_run / "private")
    assert not any("private words" in check.detail for check in audited(release).checks)


@pytest.mark.parametrize("make", [fifo, device, folder], ids=["fifo", "device", "folder"])
def test_a_shard_that_is_no_file_is_one_error(own_tiny_run: Path, make: object) -> None:
    shard = own_tiny_run / "base" / "model.safetensors"
    shard.unlink()
    assert callable(make)
    make(shard)
    with pytest.raises(FetchError, match=r"model\.safetensors"):
        read_headers(own_tiny_run / "base")


def test_a_report_of_a_folder_follows_no_link_in_it(own_tiny_run: Path) -> None:
    release = own_tiny_run / "dist" / "m"
    (release / "extraction.json").rename(own_tiny_run / "elsewhere.json")
    (release / "extraction.json").symlink_to(own_tiny_run / "elsewhere.json")
    with pytest.raises(FetchError, match=r"holds no extraction\.json"):
        read_release(None, release, staged=None)


# --- JSON ---------------------------------------------------------------------------------------------------

DOCUMENTS: dict[str, tuple[str | bytes, str]] = {
    "deep lists": ("[" * 100_000 + "]" * 100_000, "levels deep"),
    "deep objects": ('{"a":' * 65 + "1" + "}" * 65, "levels deep"),
    "deep and cut off": ("[" * 10_000_000, "levels deep"),
    "a number without end": ("1" * 65, "digits"),
    "a power without end": ("1e999", "too large"),
    "not a number": ("NaN", "NaN is no number"),
    "infinity": ("-Infinity", "-Infinity is no number"),
    "a key twice": ('{"r": 1, "r": 2}', "stands twice"),
    "half a character": ('{"a": "\\ud800"}', "half of a Unicode character"),
    "half a character as a key": ('{"\\udfff": 1}', "half of a Unicode character"),
    "many entries": ("[" + "0," * (LIMITS.entries + 1) + "0]", "entries"),
    "another encoding": ('{"a": 1}'.encode("utf-16"), "UTF-8"),
    "nothing": ("", "Expecting value"),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_json_text_that_passes_a_limit_is_refused(kind: str) -> None:
    text, words = DOCUMENTS[kind]
    with pytest.raises(ValueError, match=words):
        parse_json(text.encode() if isinstance(text, str) else text)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**60), 10**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    # no halves of characters: JSON cannot hold them
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
)


@given(JSON, st.booleans())
def test_any_ordinary_value_comes_back_as_it_was_written(value: object, ascii_alone: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_alone).encode()) == value


def test_brackets_and_digits_inside_texts_do_not_count() -> None:
    value = {'a\\"[': "[" * 500 + '\\"' + "1" * 500}
    assert parse_json(json.dumps(value).encode()) == value


# --- YAML ---------------------------------------------------------------------------------------------------


def bomb(width: int, levels: int, key: str = "") -> str:
    lines = ["a0: &a0 [" + ", ".join("x" * width) + "]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join([*lines, key]) + "\n"


YAMLS = {
    "aliases in aliases": bomb(10, 9),
    "a few aliases, doubled often": bomb(2, 40),
    "aliases in a key": bomb(3, 5, "? *a4\n: y"),
    "a list as a key": "? [a, b]\n: c",
    "a mapping as a key": "? {a: b}\n: c",
    "an alias into itself": "a: &a [*a]",
    "deep lists": "[" * 2000 + "]" * 2000,
    "deep blocks": "\n".join(f"{' ' * n}a:" for n in range(40)),
    "many entries": "a: [" + "b, " * (LIMITS.yaml_entries + 1) + "b]",
    "many bytes": "a: " + "x" * (LIMITS.yaml_bytes + 1),
    "a number without end": "a: " + "9" * 400,
    "a hexadecimal number without end": "a: 0x" + "f" * 400,
    "a date that is none": "a: 2026-13-45",
    "a Python object": "a: !!python/object/apply:os.system ['echo']",
    "a boolean that is none": "a: !!bool maybe",
}


@pytest.mark.parametrize("kind", YAMLS)
def test_a_yaml_text_that_passes_a_limit_is_refused_as_a_manifest_and_as_a_header(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_yaml(YAMLS[kind])
    (tmp_path / "m.yaml").write_text(YAMLS[kind])
    manifest, problems = read_manifest(tmp_path / "m.yaml", templates=False)
    assert manifest is None
    assert all(len(str(problem)) < 2000 for problem in problems)
    assert problems


def test_an_audit_of_a_release_whose_manifest_is_a_bomb_ends_with_a_table(own_tiny_run: Path) -> None:
    release = own_tiny_run / "dist" / "m"
    (release / "manifest.yaml").write_text(bomb(10, 12, "? *a11\n: y\n? *a11\n: y"))
    assert "manifest" in {check.name for check in audited(release).failed}


def test_a_card_whose_header_is_a_bomb_fails_its_check_alone(own_tiny_run: Path) -> None:
    release = own_tiny_run / "dist" / "m"
    for name in ("manifest.yaml", "extraction.json", "verification.json"):
        (release / name).unlink()
    (release / "README.md").write_text("---\n" + bomb(10, 12) + "---\n# x\n")
    found = {check.name: check for check in audited(release).checks}
    assert found["card"].status == "failed"
    assert "README.md has no header that can be read" in found["card"].detail


# --- names --------------------------------------------------------------------------------------------------

NAMES = ["", "a" * 513, "a\0b", "a\nb", "a\x1b[31m", "a\ud800", "a\u2028b"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_no_tensor_has_is_refused_by_one_printable_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"^a tensor|^the name") as caught:
        tensor_name(name)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


PATHS = ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a\\b", "a\0b", "a\nb", "x/.git/config", "a" * 600]


@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_a_path_that_leads_out_of_a_repository_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        repository_path(path)
    with pytest.raises(ValueError, match=r"\w"):
        FileDigest(name=path, size=1, sha256="0" * 64)


@pytest.mark.parametrize("path", ["/etc/hostname", "../../../../../etc/hostname", "/proc/kmsg", "a/../../b"])
def test_evidence_that_names_files_of_the_reader_fails_and_opens_none(own_tiny_run: Path, path: str) -> None:
    evidence = own_tiny_run / "dist" / "m" / "extraction.json"
    value = json.loads(evidence.read_bytes())
    value["summary"]["exports"] = [{"name": path, "size": 1, "sha256": "0" * 64}]
    evidence.write_text(canonical_json(value))
    found = audited(evidence.parent)
    assert "evidence" in {check.name for check in found.failed}
    assert next(check for check in found.checks if check.name == "digests").status == "not checked"


# --- headers of safetensors ---------------------------------------------------------------------------------


def safetensors(header: object, data: int, *, length: int | None = None) -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = {
    "longer than the file": safetensors({}, 0, length=2**63),
    "longer than any": safetensors({}, 0, length=2**64 - 1),
    "no object": safetensors([], 0),
    "deep": safetensors(b"[" * 5000, 0),
    "a name that is a path with NUL": safetensors({"a\0": entry()}, 8),
    "a long name": safetensors({"x" * 4000: entry()}, 8),
    "a shape below zero": safetensors({"a": entry(shape=(-1, -2))}, 8),
    "a shape of truths": safetensors({"a": entry(shape=(True, 2))}, 8),
    "a shape of fractions": safetensors({"a": entry(shape=(2.0,))}, 8),
    "a huge shape": safetensors({"a": entry(shape=(2**62, 2**62))}, 8),
    "too many dimensions": safetensors({"a": entry(shape=(1,) * 9 + (2,))}, 8),
    "an unknown dtype": safetensors({"a": entry("F33")}, 8),
    "a gap": safetensors({"a": entry(offsets=(4, 12))}, 12),
    "an overlap": safetensors({"a": entry(), "b": entry(offsets=(4, 12))}, 12),
    "offsets that go back": safetensors({"a": entry(offsets=(8, 0))}, 8),
    "three offsets": safetensors({"a": entry(offsets=(0, 4, 8))}, 8),
    "another field": safetensors({"a": entry() | {"more": 1}}, 8),
    "metadata that are no texts": safetensors({"__metadata__": {"a": [1]}, "a": entry()}, 8),
    "a name twice": safetensors(b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), 8),
    "bytes behind the last tensor": safetensors({"a": entry()}, 9),
    "cut short": safetensors({"a": entry()}, 7),
    "empty": b"",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_does_not_describe_its_file_exactly_is_one_error(kind: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(HEADERS[kind])
    with pytest.raises(FetchError, match="is not a whole safetensors file") as caught:
        file_headers(tmp_path / "m.safetensors")
    assert str(caught.value).isprintable()


def test_a_sound_header_gives_each_tensor_with_its_bytes(tmp_path: Path) -> None:
    content = safetensors({"b": entry(offsets=(8, 16)), "a": entry(), "none": entry(shape=(0,), offsets=(16, 16))}, 16)
    (tmp_path / "m.safetensors").write_bytes(content)
    found = file_headers(tmp_path / "m.safetensors")
    assert {name: (one.shape, one.stop - one.start) for name, one in found.items()} == {
        "a": ((2,), 8),
        "b": ((2,), 8),
        "none": ((0,), 0),
    }
    assert found["none"].stop == len(content)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_the_reader_of_headers_stumble(text: bytes) -> None:
    try:
        parse_header(text, file_size=len(text) + 8)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - either outcome is right, another exception is not
