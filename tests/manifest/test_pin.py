"""Pinning: every name becomes a commit id, and not one other byte of the manifest changes."""

import hashlib
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from publisher.errors import HubError, ManifestError
from publisher.manifest.pin import Pinned, pin
from publisher.manifest.reading import load_manifest

ROOT = Path(__file__).parents[2]
FULL = "c202236235762e1c871ad0ccb60c8ee5ba337b9a"
Asked = list[tuple[str, str]]
TEXT = """\
# Kept: this comment, the odd   spacing and the quotes.
version:   1
repo: "someone/tuned-lora"
license: apache-2.0
variants:
- path: /   # the root
  label: 'Tuned'
  source:
    SOURCE
  base: BASE
  model_class: LlamaForCausalLM
  adapter: {method: svd,   rank: auto, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}

card:
    template: lora_card.md.j2
    title: tuned-lora
    summary: >-
      Folded text that
      stays folded.   # no comment
"""


def commit_of(repo: str, name: str) -> str:
    """A commit id for each repository and name; what the Hub would say."""
    return hashlib.sha1(f"{repo} {name}".encode(), usedforsecurity=False).hexdigest()


@pytest.fixture
def asked() -> Asked:
    return []


@pytest.fixture
def resolve(asked: Asked) -> Callable[[str, str], str]:
    def answer(repo: str, name: str) -> str:
        asked.append((repo, name))
        return commit_of(repo, name)

    return answer


def manifest_with(folder: Path, source: str, *, base: str = f"{{repo: o/base, revision: {FULL}}}") -> Path:
    path = folder / "m.yaml"
    path.write_text(TEXT.replace("SOURCE", source).replace("BASE", base), encoding="utf-8")
    return path


WRITTEN = {
    "plain": ("repo: o/x\n    revision: main", "repo: o/x\n    revision: {}"),
    "quoted": ("repo: o/x\n    revision: 'main' # why", "repo: o/x\n    revision: '{}' # why"),
    "double quotes": ('repo: "o/x"\n    revision: "main"', 'repo: "o/x"\n    revision: "{}"'),
    "revision first": ("revision:   main\n    repo: o/x", "revision:   {}\n    repo: o/x"),
    "missing": ("repo: o/x", "repo: o/x\n    revision: {}"),
    "missing, before a comment": ("repo: o/x  # why", "repo: o/x  # why\n    revision: {}"),
    "empty": ("repo: o/x\n    revision:  # which?", "repo: o/x\n    revision: {}  # which?"),
    "null": ("repo: o/x\n    revision: ~", "repo: o/x\n    revision: {}"),
    "empty quotes": ("repo: o/x\n    revision: ''", "repo: o/x\n    revision: '{}'"),
    "flow": ("{ repo: o/x, revision: main }", "{ repo: o/x, revision: {} }"),
    "flow, missing": ("{ repo: o/x }", "{ repo: o/x, revision: {} }"),
    "flow, empty": ("{repo: o/x, revision: }", "{repo: o/x, revision: {} }"),
    "tagged": ("repo: o/x\n    revision: !!str main", "repo: o/x\n    revision: !!str {}"),
    "block text": ("repo: o/x\n    revision: >-\n      main", "repo: o/x\n    revision: {}"),
    "key in quotes": ("'repo': o/x\n    'revision': main", "'repo': o/x\n    'revision': {}"),
}


@pytest.mark.parametrize(("before", "after"), WRITTEN.values(), ids=WRITTEN.keys())
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_only_the_commit_id_changes_however_it_is_written(
    before: str, after: str, line_end: str, tmp_path: Path, resolve: Callable[[str, str], str]
) -> None:
    path = manifest_with(tmp_path, before)
    path.write_bytes(path.read_bytes().replace(b"\n", line_end.encode()))
    commit = commit_of("o/x", "main")
    assert pin(path, resolve) == (Pinned("variants[0].source", "o/x", "main", commit),)
    wanted = TEXT.replace("SOURCE", after.replace("{}", commit)).replace("BASE", f"{{repo: o/base, revision: {FULL}}}")
    assert path.read_bytes().decode() == wanted.replace("\n", line_end)
    assert load_manifest(path).variants[0].source.revision == commit


@pytest.mark.parametrize("name", ["main", "v1.0", "refs/pr/3", "ed3eed33", "12345678", "1.10", "yes"])
def test_the_name_is_asked_for_as_it_stands_in_the_file(
    name: str, tmp_path: Path, resolve: Callable[[str, str], str], asked: Asked
) -> None:
    pin(manifest_with(tmp_path, f"repo: o/x\n    revision: {name}"), resolve)
    assert asked == [("o/x", name)]


def test_a_commit_id_of_decimal_digits_alone_is_written_in_quotes(tmp_path: Path) -> None:
    path = manifest_with(tmp_path, "repo: o/x\n    revision: main")
    pin(path, lambda _repo, _name: "1" * 40)
    assert f'revision: "{"1" * 40}"' in path.read_text()
    assert load_manifest(path).variants[0].source.revision == "1" * 40


def test_a_pinned_manifest_is_not_touched_and_nobody_is_asked(
    tmp_path: Path, resolve: Callable[[str, str], str], asked: Asked
) -> None:
    path = tmp_path / "clef.yaml"
    path.write_bytes((ROOT / "manifests/clef.yaml").read_bytes())
    before = path.stat()
    assert pin(path, resolve) == ()
    assert asked == []
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_pinning_twice_changes_nothing_more(tmp_path: Path, resolve: Callable[[str, str], str], asked: Asked) -> None:
    path = manifest_with(tmp_path, "repo: o/x", base="{repo: o/y, revision: v2}")
    assert [reference.field for reference in pin(path, resolve)] == ["variants[0].source", "variants[0].base"]
    once = path.read_bytes()
    assert pin(path, resolve) == ()
    assert path.read_bytes() == once
    assert asked == [("o/x", "main"), ("o/y", "v2")]


def test_a_local_folder_needs_no_pin(tmp_path: Path, resolve: Callable[[str, str], str], asked: Asked) -> None:
    assert pin(manifest_with(tmp_path, "path: models/tuned"), resolve) == ()
    assert asked == []


def test_a_name_that_two_references_share_is_asked_for_once(
    tmp_path: Path, resolve: Callable[[str, str], str], asked: Asked
) -> None:
    path = manifest_with(tmp_path, "repo: o/x\n    revision: main", base="{repo: o/x, revision: main}")
    assert len(pin(path, resolve)) == 2
    assert asked == [("o/x", "main")]


def test_nothing_is_written_when_one_of_two_names_fails(tmp_path: Path) -> None:
    def fails_for_base(repo: str, name: str) -> str:
        if repo == "o/y":
            raise HubError("o/y has no revision v2")
        return commit_of(repo, name)

    path = manifest_with(tmp_path, "repo: o/x", base="{repo: o/y, revision: v2}")
    before = path.read_bytes()
    with pytest.raises(HubError, match="no revision v2"):
        pin(path, fails_for_base)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m.yaml"]


def test_an_answer_that_is_no_commit_id_is_not_written(tmp_path: Path) -> None:
    path = manifest_with(tmp_path, "repo: o/x")
    before = path.read_bytes()
    with pytest.raises(ManifestError, match="o/x answered 'main' for main"):
        pin(path, lambda _repo, name: name)
    assert path.read_bytes() == before


def test_other_faults_are_all_reported_before_anybody_is_asked(
    tmp_path: Path, resolve: Callable[[str, str], str], asked: Asked
) -> None:
    path = manifest_with(tmp_path, "repo: o/x\n    revision: main")
    path.write_text(path.read_text().replace("bfloat16", "bf16").replace("rank: auto", "rank: 0"))
    before = path.read_bytes()
    with pytest.raises(ManifestError, match="2 problems") as caught:
        pin(path, resolve)
    assert "rank: 0 is not a rank" in str(caught.value)
    assert "'bf16' is not possible here" in str(caught.value)
    assert (asked, path.read_bytes()) == ([], before)


@pytest.mark.parametrize("text", ["", "- 1", "{", "&a {<<: *a}", "variants: [1, {source: 2}]", "variants: {a: b}"])
def test_what_is_no_manifest_is_refused_as_check_refuses_it(
    text: str, tmp_path: Path, resolve: Callable[[str, str], str]
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError) as pinning:
        pin(path, resolve)
    with pytest.raises(ManifestError) as checking:
        load_manifest(path)
    assert str(pinning.value) == str(checking.value)


def test_a_file_that_is_not_there_is_an_error_of_the_manifest(
    tmp_path: Path, resolve: Callable[[str, str], str]
) -> None:
    with pytest.raises(ManifestError, match="no such file"):
        pin(tmp_path / "none.yaml", resolve)


def test_the_file_behind_a_link_is_pinned_and_keeps_its_mode(
    tmp_path: Path, resolve: Callable[[str, str], str]
) -> None:
    path = manifest_with(tmp_path, "repo: o/x")
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path.name)
    pin(link, resolve)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert load_manifest(path).variants[0].source.revision == commit_of("o/x", "main")


ANCHORED = {
    "one mapping for both": ("&s\n    repo: o/x\n    revision: main", "*s"),
    "an anchored name": ("repo: o/x\n    revision: &r main", "{repo: o/y, revision: *r}"),
    "an anchored repository": ("repo: &r o/x", "{repo: *r}"),
    "a merge with another repository": ("&s\n    repo: o/x\n    revision: main", "{<<: *s, repo: o/y}"),
    "a merge with another revision": ("&s\n    repo: o/x\n    revision: main", "{<<: *s, revision: v2}"),
    "a merge of a list": ("&s\n    repo: o/x\n    revision: main", "{<<: [*s]}"),
}


@pytest.mark.parametrize(("source", "base"), ANCHORED.values(), ids=ANCHORED.keys())
def test_anchors_aliases_and_merges_end_up_at_the_right_commits(
    source: str, base: str, tmp_path: Path, resolve: Callable[[str, str], str]
) -> None:
    path = manifest_with(tmp_path, source, base=base)
    if source.startswith("&"):
        path.write_text(path.read_text().replace("source:\n    &s", "source: &s"))
    pinned = pin(path, resolve)
    variant = load_manifest(path).variants[0]
    assert [reference.field for reference in pinned] == ["variants[0].source", "variants[0].base"]
    assert variant.source.revision == commit_of("o/x", "main")
    assert variant.base.revision == commit_of(variant.base.repo or "", pinned[1].name)


def test_one_revision_that_would_have_to_be_two_commits_is_refused(
    tmp_path: Path, resolve: Callable[[str, str], str]
) -> None:
    path = manifest_with(tmp_path, "&s\n    repo: o/x", base="{<<: [{revision: v2}, *s]}")
    path.write_text(path.read_text().replace("source:\n    &s", "source: &s"))
    before = path.read_bytes()
    with pytest.raises(ManifestError, match=r"variants\[0\]"):
        pin(path, resolve)
    assert path.read_bytes() == before


names = st.from_regex(r"[a-z][a-z0-9.]{0,8}", fullmatch=True).filter(lambda name: name != "null")
comments = st.sampled_from(["", "  # é: {x}", "   # '"])


@settings(max_examples=40)
@given(name=names, quote=st.sampled_from(["", "'", '"']), comment=comments, flow=st.booleans())
def test_whatever_the_style_the_rest_of_the_file_is_the_same(
    name: str, quote: str, comment: str, flow: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    written = f"{quote}{name}{quote}"
    source = f"{{revision: {written}, repo: o/x}}{comment}" if flow else f"repo: o/x\n    revision: {written}{comment}"
    path = manifest_with(tmp_path_factory.getbasetemp(), source)
    before = path.read_text(encoding="utf-8")
    pin(path, commit_of)
    commit = commit_of("o/x", name)
    wanted = before.replace(f"revision: {written}", f"revision: {quote}{commit}{quote}", 1)
    assert path.read_text(encoding="utf-8") == wanted
