"""The manifest: what is published, from which pinned checkpoints, and how.

One YAML file becomes one frozen `Manifest`. Everything wrong with it is reported at once, each problem as
`file: field.path: what is wrong; what to do`. It refuses unknown and duplicate keys, moving or abbreviated
revisions, and paths that leave the repository. No network, no torch: reading a manifest must be instant.
"""

import difflib
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from publisher import artefacts
from publisher.errors import ManifestError
from publisher.files import packaged_folder

TASK_TYPES = (
    "CAUSAL_LM",
    "FEATURE_EXTRACTION",
    "QUESTION_ANS",
    "SEQ_2_SEQ_LM",
    "SEQ_CLS",
    "TOKEN_CLS",
)


def _repo_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) or ".." in text or "--" in text:
        raise ValueError(f"'{text}' is not a repository id; write it as owner/name")
    return text


def _commit_id(text: str) -> str:
    if re.fullmatch(r"[0-9a-f]{40}", text):
        return text
    if re.fullmatch(r"[0-9a-f]{7,39}", text):
        what = f"'{text}' is an abbreviated commit id, which the Hub does not resolve"
    else:
        what = f"'{text}' is a moving name"
    raise ValueError(f"{what}; pin the full commit id: publish pin MANIFEST")


def _local_path(text: str) -> str:
    if not text or text.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:", text):
        raise ValueError(
            f"'{text}' is an absolute path, which would put this machine's folders into the card; "
            "write it relative to the folder you run publish in (a symbolic link will do)"
        )
    return text


def _variant_path(text: str) -> str:
    if text == "/":
        return text
    parts = text.removesuffix("/").split("/")
    if text.startswith("/"):
        raise ValueError(f"'{text}' is absolute; write '/' for the root or a subfolder such as 'flash/'")
    if any(part in {"", ".", ".."} for part in parts):
        raise ValueError(f"'{text}' leaves the repository or is not plain; write a subfolder such as 'flash/'")
    if not all(re.fullmatch(r"[\w][\w.-]*", part) for part in parts):
        raise ValueError(f"'{text}' holds characters a folder name may not; use letters, digits, '.', '_', '-'")
    if parts[0] in artefacts.ALL:
        raise ValueError(f"'{text}' is the name of a file this tool writes; choose another")
    return "/".join(parts) + "/"


def _rank(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value == "auto" or (whole and value > 0):
        return value
    raise ValueError(f"{value!r} is not a rank; write a whole number above zero, or auto")


def _layers(value: Any) -> Any:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text) if isinstance(text, str) else None
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"{value!r} is not a range of layers; write it as 40-63")
    return text


def _identifier(text: str) -> str:
    if not text.isidentifier():
        raise ValueError(f"'{text}' is not a class name; write it as in config.json's architectures")
    return text


def _task_type(value: Any) -> Any:
    if value not in TASK_TYPES:
        raise ValueError(f"{value!r} is not a PEFT task type; use one of {', '.join(TASK_TYPES)}")
    return value


def _license(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text):
        raise ValueError(f"'{text}' is not a licence identifier of the Hub; write it as apache-2.0")
    return text


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; write a few words")
    return text


RepoId = Annotated[str, AfterValidator(_repo_id)]
CommitId = Annotated[str, AfterValidator(_commit_id)]
Text = Annotated[str, AfterValidator(_text)]


class _Model(BaseModel):
    """Frozen and strict; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Reference(_Model):
    """A checkpoint: a Hub repository at a full commit id, or a local folder."""

    repo: RepoId | None = None
    revision: CommitId | None = None
    path: Annotated[str, AfterValidator(_local_path)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.path is not None and (self.repo or self.revision):
            raise ValueError("has both path and repo; give repo and revision, or path alone")
        if self.path is None and self.repo is None:
            raise ValueError("names no checkpoint; give repo and revision, or path")
        if self.repo is not None and self.revision is None:
            raise ValueError("has a repo without a revision; pin it: publish pin MANIFEST")
        return self

    @property
    def where(self) -> str:
        """The reference as one string: what `from_pretrained` takes."""
        return self.path or self.repo or ""


class AdapterSettings(_Model):
    """How the adapter is made. Nothing here has a hidden default but `ignore`, which is empty."""

    method: Literal["svd"]
    rank: Annotated[int | Literal["auto"], BeforeValidator(_rank)]
    dtype: Literal["bfloat16", "float32", "float16"]
    layout: Literal["pattern", "uniform"]
    task_type: Annotated[str, BeforeValidator(_task_type)]
    ignore: Annotated[tuple[Text, ...], Field(strict=False)] = ()


class Expectation(_Model):
    """What the checkpoint must show; the run fails where it says otherwise."""

    linears: Annotated[int, Field(gt=0)] | None = None
    layers: Annotated[str, BeforeValidator(_layers)] | None = None


class Variant(_Model):
    """One adapter: where it goes in the repository, what it comes from, how it is made."""

    path: Annotated[str, AfterValidator(_variant_path)]
    label: Text
    source: Reference
    base: Reference
    model_class: Annotated[str, AfterValidator(_identifier)]
    adapter: AdapterSettings
    expect: Expectation = Expectation()

    @model_validator(mode="after")
    def _task_fits_class(self) -> Self:
        conditional = self.model_class.endswith("ForConditionalGeneration")
        if conditional and self.adapter.task_type == "CAUSAL_LM":
            raise ValueError(
                f"adapter.task_type CAUSAL_LM makes PEFT build the text-only class instead of {self.model_class} "
                "and load nothing, silently; use FEATURE_EXTRACTION"
            )
        return self

    @property
    def folder(self) -> str:
        """The subfolder in the repository without a trailing slash; empty for the root."""
        return "" if self.path == "/" else self.path.removesuffix("/")


class CardSettings(_Model):
    """What the card says that no artefact can know."""

    template: Text
    title: Text
    summary: Text
    usage: Text = "usage_peft.md.j2"


class Manifest(_Model):
    """The whole manifest, version 1."""

    version: Literal[1]
    repo: RepoId
    license: Annotated[str, AfterValidator(_license)]
    variants: Annotated[tuple[Variant, ...], Field(strict=False)]
    card: CardSettings

    @field_validator("variants")
    @classmethod
    def _one_variant_per_path(cls, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        if not variants:
            raise ValueError("is empty; list at least one variant")
        paths = [variant.path for variant in variants]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise ValueError(f"two variants are at path {', '.join(twice)}; give each its own")
        return variants

    @property
    def is_local(self) -> bool:
        """True where a reference is a local folder: nobody else could check what is published."""
        return any(ref.path is not None for v in self.variants for ref in (v.source, v.base))


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with one manifest."""

    file: Path
    field: str
    what: str

    def __str__(self) -> str:
        place = f"{self.file}: {self.field}" if self.field else f"{self.file}"
        return f"{place}: {self.what}"


def load_manifest(path: Path) -> Manifest:
    """Read one manifest.

    Raises:
        ManifestError: naming every problem of the file, a line each.
    """
    manifest, problems = read_manifest(path)
    if manifest is None:
        raise ManifestError(f"{len(problems)} problem{'s'[: len(problems) != 1]} in the manifest:\n" + _lines(problems))
    return manifest


def read_manifest(path: Path, *, templates: bool = True) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """The manifest, or every problem that keeps it from being one; never both.

    Without `templates` it is none that the card's templates are not there: whoever reads a release has no use for them.
    """
    data, problems = _read_yaml(path)
    if data is None:
        return None, problems
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        found = (_problem(path, details) for details in error.errors(include_url=False))
        return None, (*problems, *found, *(_template_problems(path, data) if templates else ()))
    problems = (*problems, *(_template_problems(path, data) if templates else ()))
    return (None, problems) if problems else (manifest, ())


def _lines(problems: Iterable[Problem]) -> str:
    return "\n".join(f"  {problem}" for problem in problems)


def find_template(manifest_file: Path, name: str) -> Path | None:
    """A template of the card, whole or usage part: beside the manifest, or one that comes with this tool."""
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


# --- YAML ---------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """SafeLoader that remembers duplicate keys, which PyYAML would silently overwrite."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[tuple[str, int]] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT002 - PyYAML's signature
        keys = [key.value for key, _ in node.value]
        for index, (key, _) in enumerate(node.value):
            if key.value in keys[:index]:
                self.duplicates.append((str(key.value), key.start_mark.line + 1))
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> tuple[dict[Hashable, Any] | None, tuple[Problem, ...]]:
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        data = loader.get_single_data()
    except FileNotFoundError:
        return None, (Problem(path, "", "no such file; write one with: publish new --source A --base B"),)
    except (OSError, UnicodeDecodeError) as error:
        return None, (Problem(path, "", f"cannot be read as text ({error}); give a YAML file"),)
    except yaml.YAMLError as error:
        return None, (Problem(path, "", f"is not YAML: {_yaml_complaint(error)}; correct that line"),)
    if not isinstance(data, dict):
        return None, (Problem(path, "", "is not a mapping of fields; see docs/manifest.md"),)
    what = "key '{}' stands twice, on line {} again; keep one"
    return data, tuple(Problem(path, key, what.format(key, line)) for key, line in loader.duplicates)


def _yaml_complaint(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


# --- pydantic's complaints in our words ---------------------------------------------------------------------


def _problem(path: Path, details: ErrorDetails) -> Problem:
    explain = _EXPLANATIONS.get(details["type"], _type_complaint)
    return Problem(path, _dotted(details["loc"]), explain(details))


def _dotted(loc: Sequence[int | str]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _type_complaint(details: ErrorDetails) -> str:
    given = details["input"]
    kind = "nothing" if given is None else f"{given!r} ({type(given).__name__})"
    hint = "; put it in quotes" if details["type"] == "string_type" and isinstance(given, int | float) else ""
    return f"found {kind}: {details['msg'][:1].lower()}{details['msg'][1:]}{hint or '; see docs/manifest.md'}"


def _unknown_key(details: ErrorDetails) -> str:
    key = str(details["loc"][-1])
    close = difflib.get_close_matches(key, _all_fields(), n=1)
    return f"is not a known field; {f'did you mean {close[0]}?' if close else 'remove it, or see docs/manifest.md'}"


def _all_fields() -> set[str]:
    models = (Manifest, Variant, Reference, AdapterSettings, Expectation, CardSettings)
    return {name for model in models for name in model.model_fields}


def _wrong_choice(details: ErrorDetails) -> str:
    return f"{details['input']!r} is not possible here; use {details.get('ctx', {}).get('expected', '')}"


_EXPLANATIONS: dict[str, Callable[[ErrorDetails], str]] = {
    "missing": lambda details: f"is missing; add {details['loc'][-1]}",
    "extra_forbidden": _unknown_key,
    "literal_error": _wrong_choice,
    "value_error": lambda details: str(details["msg"]).removeprefix("Value error, "),
}
