"""Reading a manifest: one YAML file becomes one frozen `Manifest`, or every problem of it at once.

Each problem reads `file: field.path: what is wrong; what to do`. No network, no torch: reading a
manifest must be instant.
"""

from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from publisher.border.files import read_regular
from publisher.border.limits import LIMITS
from publisher.border.yaml_text import BoundedLoader
from publisher.errors import ManifestError
from publisher.manifest.messages import Problem, dotted, kind_of, problem_of
from publisher.manifest.schema import Manifest
from publisher.records.files import packaged_folder


def load_manifest(path: Path) -> Manifest:
    """Read one manifest, whole and checked.

    Raises:
        ManifestError: naming every problem of the file, a line each.
    """
    manifest, problems = read_manifest(path)
    if manifest is None:
        raise manifest_error(problems)
    return manifest


def read_manifest(path: Path, *, templates: bool = True) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """Return the manifest, or every problem that keeps it from being one; never both.

    Args:
        path: the YAML file.
        templates: whether the card's templates must be there; who reads a release has no use for them.
    """
    text, problems = read_manifest_text(path)
    return (None, problems) if text is None else parse_manifest(path, text, templates=templates)


def read_manifest_text(path: Path) -> tuple[str | None, tuple[Problem, ...]]:
    """Return the file's text with its line ends as they are, or the problem that keeps it from being read."""
    try:
        return read_regular(path, limit=LIMITS.yaml_bytes).decode(), ()
    except FileNotFoundError:
        return None, (Problem(path, "", "no such file; write one with: publish new --source A --base B"),)
    except UnicodeDecodeError:
        return None, (Problem(path, "", "is not text in UTF-8; give a YAML file"),)
    except OSError as error:
        return None, (Problem(path, "", f"cannot be read ({error.strerror}); give a YAML file"),)


def parse_manifest(path: Path, text: str, *, templates: bool = True) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """Return the manifest that a text holds, or every problem that keeps it from being one; never both.

    Args:
        path: the file that holds the text or is about to hold it, for messages and for templates beside it.
        text: YAML.
        templates: whether the card's templates must be there.

    Returns:
        The manifest and no problem, or None and all problems.
    """
    data, problems = _parse_yaml(path, text)
    if data is None:
        return None, problems
    foreign = _version_problems(path, data)
    if foreign:
        return None, foreign
    manifest = None
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        problems += tuple(problem_of(path, details) for details in error.errors(include_url=False))
    if templates:
        problems += _template_problems(path, data)
    return (None, problems) if problems else (manifest, ())


def manifest_error(problems: Sequence[Problem]) -> ManifestError:
    """Return the error that names all these problems, a line each."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ManifestError(f"{count} in the manifest:\n" + "\n".join(f"  {problem}" for problem in problems))


def _version_problems(path: Path, data: dict[Hashable, Any]) -> tuple[Problem, ...]:
    """Return the problem of a manifest of another version: nothing else that could be said of it would be true."""
    version = data.get("version", 1)
    if isinstance(version, int) and not isinstance(version, bool) and version != 1:
        advice = "install a newer publisher" if version > 1 else "write version: 1"
        return (Problem(path, "version", f"is {version}, and this publisher reads version 1; {advice}"),)
    return ()


def find_template(manifest_file: Path, name: str) -> Path | None:
    """Find a template of the card, whole or usage part, beside the manifest or among those that come with this tool."""
    for folder in (manifest_file.parent, packaged_folder("templates")):
        if Path(name).name == name and (folder / name).is_file():
            return folder / name
    return None


_TEMPLATES = {"template": "*_card.md.j2", "usage": "usage_*.md.j2"}


def _template_problems(path: Path, data: dict[Hashable, Any]) -> tuple[Problem, ...]:
    card = data.get("card")
    names = {field: card.get(field) for field in _TEMPLATES} if isinstance(card, dict) else {}
    return tuple(
        Problem(path, f"card.{field}", _unknown_template(field, name))
        for field, name in names.items()
        if isinstance(name, str) and name and not find_template(path, name)
    )


def _unknown_template(field: str, name: str) -> str:
    known = sorted(file.name for file in packaged_folder("templates").glob(_TEMPLATES[field]))
    return f"there is no template '{name}'; use {', '.join(known)}, or put the file beside the manifest"


def _parse_yaml(path: Path, text: str) -> tuple[dict[Hashable, Any] | None, tuple[Problem, ...]]:
    try:
        loader = BoundedLoader(text)
        node = loader.get_single_node()
        problems = tuple(_duplicates(path, node)) if node else ()
        data = loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        return None, (Problem(path, "", f"is not YAML: {_yaml_complaint(error)}; correct that line"),)
    except (ValueError, LookupError, AttributeError) as error:
        # PyYAML's own slips, on values such as 2026-13-45 and `!!bool maybe`.
        return None, (Problem(path, "", f"holds a value that YAML cannot read ({error}); put it in quotes"),)
    if data is None:
        return None, (Problem(path, "", "is empty; write one with: publish new --source A --base B"),)
    if not isinstance(data, dict):
        return None, (Problem(path, "", f"is {kind_of(data)}, not a mapping of fields; see docs/manifest.md"),)
    return data, problems


def _duplicates(path: Path, root: yaml.Node) -> Iterator[Problem]:
    """Find keys that stand twice in one mapping, of which PyYAML would silently keep the last."""
    todo: list[tuple[tuple[int | str, ...], yaml.Node]] = [((), root)]
    done: set[int] = set()
    for place, node in todo:
        if id(node) in done:  # an alias
            continue
        done.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += [((*place, index), item) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            todo += [((*place, str(key.value)), value) for key, value in node.value]
            yield from _twice(path, place, keys=[key for key, _ in node.value])


def _twice(path: Path, place: tuple[int | str, ...], *, keys: list[yaml.Node]) -> Iterator[Problem]:
    seen: set[str] = set()
    for key in keys:
        if key.value in seen:
            what = f"stands twice, on line {key.start_mark.line + 1} again; keep one"
            yield Problem(path, dotted((*place, str(key.value))), what)
        seen.add(key.value)


def _yaml_complaint(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        what = (error.problem or "cannot be read").removeprefix("but ")
        return f"{what} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())
