"""`publish pin`: the only command that writes to a manifest somebody wrote.

Names that may move (branches, tags, abbreviated commit ids, or none at all) become full commit ids. The YAML is
parsed for the places alone and the ids are set into the text there, so that comments, order, quotes and spacing
stay byte for byte. It refuses a manifest that would not be sound once pinned, and writes all pins or none.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from publisher.errors import ManifestError
from publisher.files import atomic
from publisher.manifest import Problem, is_commit_id, manifest_error, parse_manifest, read_text

DEFAULT_BRANCH = "main"  # the Hub's repositories have no other default
_UNDECIDED = "f" * 40
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")


@dataclass(frozen=True, slots=True)
class Pinned:
    """One reference that was pinned: its place in the manifest, and the commit that its name meant."""

    field: str
    repo: str
    name: str
    commit: str


@dataclass(frozen=True, slots=True)
class _Loose:
    """A reference to pin: text[start:end] gives way to `before`, the commit id and `after`."""

    field: str
    repo: str
    name: str
    start: int
    end: int
    before: str
    after: str = ""


def pin(path: Path, resolve: Callable[[str, str], str]) -> tuple[Pinned, ...]:
    """Write full commit ids into the manifest, and say which; `resolve(repo, name)` gives the commit.

    Nothing is written where nothing is loose, and nothing where anything fails.

    Raises:
        ManifestError: where the manifest has problems that pinning does not mend, naming all of them.
        HubError: what `resolve` raises.
    """
    text, problems = read_text(path)
    if text is None:
        raise manifest_error(problems)
    loose = tuple(_loose_references(text))
    problems = parse_manifest(path, _set(text, [(reference, _UNDECIDED) for reference in loose]))[1]
    problems += tuple(_shared(path, loose))
    if problems:
        raise manifest_error(problems)
    pinned = _resolved(loose, resolve)
    if pinned:
        _write(path, _set(text, [(reference, pin.commit) for reference, pin in zip(loose, pinned, strict=True)]))
    return pinned


def _resolved(loose: Sequence[_Loose], resolve: Callable[[str, str], str]) -> tuple[Pinned, ...]:
    commits: dict[tuple[str, str], str] = {}
    for reference in loose:
        asked = (reference.repo, reference.name)
        if asked not in commits:
            commits[asked] = resolve(*asked)
        if not is_commit_id(commits[asked]):
            raise ManifestError(
                f"{reference.field}: {reference.repo} answered {commits[asked]!r} for {reference.name}",
                expected="a full commit id",
                next_step="check HF_ENDPOINT",
            )
    return tuple(Pinned(ref.field, ref.repo, ref.name, commits[ref.repo, ref.name]) for ref in loose)


def _shared(path: Path, loose: Sequence[_Loose]) -> Iterator[Problem]:
    """Two references whose one text, shared through a YAML anchor, would have to become two commit ids."""
    first: dict[int, _Loose] = {}
    for reference in loose:
        other = first.setdefault(reference.start, reference)
        if other.repo != reference.repo:
            what = f"shares its revision with {other.field}, another repository; write the revision out"
            yield Problem(path, reference.field, what)


# --- where the ids go in the text ---------------------------------------------------------------------------


def _set(text: str, commits: Sequence[tuple[_Loose, str]]) -> str:
    """The text with each commit id in its place; places shared through an anchor are set once."""
    places = {reference.start: (reference, commit) for reference, commit in commits}
    for start in sorted(places, reverse=True):
        reference, commit = places[start]
        text = text[:start] + reference.before + commit + reference.after + text[reference.end :]
    return text


def _write(path: Path, text: str) -> None:
    """Replace the file that a link may lead to, and keep its mode."""
    file = path.resolve()
    with atomic(file) as partial:
        partial.write_bytes(text.encode())
        shutil.copymode(file, partial)


def _loose_references(text: str) -> Iterator[_Loose]:
    """Every reference to a Hub repository that is not at a full commit id; none where the text is not YAML."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        variants = _fields(loader, root).get("variants", (None, None))[1]
        for index, variant in enumerate(variants.value if isinstance(variants, yaml.SequenceNode) else ()):
            for side in ("source", "base"):
                reference = _fields(loader, _fields(loader, variant).get(side, (None, None))[1])
                yield from _loose(text, f"variants[{index}].{side}", fields=reference)
    except yaml.YAMLError:
        return
