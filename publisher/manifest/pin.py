"""`publish pin`: the only command that writes to a manifest somebody wrote.

Names that may move (branches, tags, abbreviated commit ids, or none at all) become full commit ids. The YAML is
parsed for the places alone and the ids are set into the text there, so that comments, order, quotes and spacing
stay byte for byte. It refuses a manifest that would not be sound once pinned, and writes all pins or none.

YAML lets references share their text: by an alias (`base: *other`), or by a merge (`{<<: *other, repo: a/b}`). A shared
place is pinned once. Where a merge would give another repository the same revision, the reference gets one of its own.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from publisher.border.yaml_text import BoundedLoader
from publisher.errors import ManifestError
from publisher.manifest.fields import is_commit_id
from publisher.manifest.reading import manifest_error, parse_manifest, read_manifest_text
from publisher.manifest.schema import Manifest
from publisher.records.files import atomic

DEFAULT_BRANCH = "main"  # of every repository on the Hub
_UNDECIDED = "f" * 40
_SIDES = ("source", "base", "fp8")  # a dataset of requests is pinned by hand
_ALIAS = re.compile(r"\s*:\s*(\*[^\s,\]}]+)")
_ANCHOR_OR_TAG = re.compile(r"(?:[&!]\S*\s+)*")
_REST_OF_LINE = re.compile(r"[^\r\n]*")


@dataclass(frozen=True, slots=True)
class Pinned:
    """One reference that was pinned.

    Attributes:
        field: its place in the manifest, such as `variants[0].source`.
        repo: the repository, as owner/name.
        name: the branch, tag or abbreviated commit id that was written; `main` where there was none.
        commit: the full commit id that the name meant.
    """

    field: str
    repo: str
    name: str
    commit: str


@dataclass(frozen=True, slots=True)
class _Loose:
    """A reference to pin: text[start:end] is replaced by `before` and the commit id, between `quote` and `quote`."""

    field: str
    repo: str
    name: str
    start: int
    end: int
    before: str = ""
    quote: str = ""


@dataclass(frozen=True, slots=True)
class _Field:
    """A key and its value in the YAML text, and the mapping that they stand in, which a merge may have brought."""

    holder: yaml.MappingNode
    key: yaml.ScalarNode
    value: yaml.Node


def pin(path: Path, resolve: Callable[[str, str], str]) -> tuple[Pinned, ...]:
    """Write full commit ids into a manifest, and return which.

    Nothing is written where every reference is pinned already, and nothing where anything fails.

    Args:
        path: the manifest's file.
        resolve: the function that gives the commit id of a repository and a name.

    Raises:
        ManifestError: where the manifest has problems that pinning does not mend, naming all of them.
        HubError: what `resolve` raises.
    """
    text, problems = read_manifest_text(path)
    if text is None:
        raise manifest_error(problems)
    loose = tuple(_loose_references(text))
    _parsed(path, _set(text, loose, commits=[_UNDECIDED] * len(loose)))
    pinned = _resolved(loose, resolve)
    if pinned:
        _write(path, _set(text, loose, commits=[reference.commit for reference in pinned]), pinned=pinned)
    return pinned


def _parsed(path: Path, text: str) -> Manifest:
    manifest, problems = parse_manifest(path, text)
    if manifest is None:
        raise manifest_error(problems)
    return manifest


def _resolved(loose: Sequence[_Loose], resolve: Callable[[str, str], str]) -> tuple[Pinned, ...]:
    asked = dict.fromkeys((reference.repo, reference.name) for reference in loose)
    commits = {(repo, name): resolve(repo, name) for repo, name in asked}
    for (repo, name), commit in commits.items():
        if not is_commit_id(commit):
            raise ManifestError(f"{repo} answered {commit!r} for {name}", expected="a full commit id")
    return tuple(Pinned(ref.field, ref.repo, ref.name, commits[ref.repo, ref.name]) for ref in loose)


def _write(path: Path, text: str, *, pinned: Sequence[Pinned]) -> None:
    """Replace the file, which a link may lead to, and keep its mode; the text must say what was resolved."""
    manifest = _parsed(path, text)
    revisions = dict(_revisions(manifest))
    crossed = [reference.field for reference in pinned if revisions[reference.field] != reference.commit]
    if crossed:
        raise ManifestError(
            f"{path}: {', '.join(crossed)}: shares its revision with another repository through YAML anchors",
            next_step="write each revision out, then pin again",
        )
    file = path.resolve()
    content = text.encode()
    with atomic(file, size=len(content)) as partial:
        partial.write_bytes(content)
        shutil.copymode(file, partial)


def _revisions(manifest: Manifest) -> Iterator[tuple[str, str | None]]:
    for index, variant in enumerate(manifest.variants):
        for side in _SIDES:
            if (reference := getattr(variant, side)) is not None:
                yield f"variants[{index}].{side}", reference.revision


# --- where the ids go in the text ---------------------------------------------------------------------------


def _set(text: str, loose: Sequence[_Loose], *, commits: Sequence[str]) -> str:
    """Return the text with each commit id in its place; a place that two references share is set once."""
    places = {reference.start: (reference, commit) for reference, commit in zip(loose, commits, strict=True)}
    for start, (reference, commit) in sorted(places.items(), reverse=True):
        quote = reference.quote or ('"' if commit.isdigit() else "")
        text = f"{text[:start]}{reference.before}{quote}{commit}{quote}{text[reference.end :]}"
    return text


def _loose_references(text: str) -> Iterator[_Loose]:
    """Find every reference to a Hub repository that is not at a full commit id; none where the text is not YAML."""
    try:
        variants = _find(yaml.compose(text, BoundedLoader), "variants")
        listed = variants.value if variants else None
        for index, variant in enumerate(listed.value if isinstance(listed, yaml.SequenceNode) else ()):
            for side in _SIDES:
                reference = _find(variant, side)
                yield from _loose(text, f"variants[{index}].{side}", node=reference.value if reference else None)
    except yaml.YAMLError:
        return


def _find(node: yaml.Node | None, name: str) -> _Field | None:
    """Find the field of this name in a mapping, or in those that `<<` merges into it."""
    if isinstance(node, yaml.SequenceNode):  # `<<: [*a, *b]`: the first that has it
        return next(filter(None, (_find(item, name) for item in node.value)), None)
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if key.value == name:
            return _Field(node, key, value)
    merged = (value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge")
    return next(filter(None, (_find(value, name) for value in merged)), None)


def _loose(text: str, field: str, *, node: yaml.Node | None) -> Iterator[_Loose]:
    repo, revision = _find(node, "repo"), _find(node, "revision")
    if repo is None or not isinstance(repo.value, yaml.ScalarNode):
        return
    if revision is None:
        yield _insertion(text, field, repo=repo, name=DEFAULT_BRANCH)
    elif isinstance(revision.value, yaml.ScalarNode) and not is_commit_id(revision.value.value):
        empty = revision.value.tag == "tag:yaml.org,2002:null" or not revision.value.value
        name = DEFAULT_BRANCH if empty else revision.value.value
        if revision.holder in {node, repo.holder}:
            yield _replacement(text, field, revision=revision, repo=repo.value.value, name=name)
        else:  # merged in from a reference to another repository
            yield _insertion(text, field, repo=repo, name=name)


def _replacement(text: str, field: str, *, revision: _Field, repo: str, name: str) -> _Loose:
    start, end = _extent(text, revision)
    written = text[start:end]
    quote = written[:1] if written.startswith(("'", '"')) else ""
    return _Loose(field, repo, name, start, end, before="" if written else " ", quote=quote)


def _insertion(text: str, field: str, *, repo: _Field, name: str) -> _Loose:
    _, end = _extent(text, repo)
    if repo.holder.flow_style:
        before = ", revision: "
    else:
        end = _span(_REST_OF_LINE, text, end)[1]
        newline = "\r\n" if "\r\n" in text else "\n"
        before = f"{newline}{' ' * repo.key.start_mark.column}revision: "
    return _Loose(field, repo.value.value, name, end, end, before=before)


def _extent(text: str, field: _Field) -> tuple[int, int]:
    """Return start and end of a scalar as it is written: the alias where it is one, else without anchor and tag."""
    start, end = field.value.start_mark.index, field.value.end_mark.index
    if start < field.key.end_mark.index:  # the value stands earlier: an alias
        return _span(_ALIAS, text, field.key.end_mark.index, group=1)
    start = _span(_ANCHOR_OR_TAG, text[:end], start)[1]
    return start, start + len(text[start:end].rstrip())


def _span(pattern: re.Pattern[str], text: str, start: int, *, group: int = 0) -> tuple[int, int]:
    match = pattern.match(text, start)
    return match.span(group) if match else (start, start)
