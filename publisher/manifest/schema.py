"""The manifest: what is published, from which pinned checkpoints, and how.

One YAML file becomes one frozen `Manifest`. Everything wrong with it is reported at once, each problem as
`file: field.path: what is wrong; what to do`; only rules across fields wait until the fields themselves are sound.
It refuses unknown and duplicate keys, moving or abbreviated revisions, and paths that leave the repository. No
network, no torch: reading a manifest must be instant.
"""

import base64
import binascii
import difflib
import math
import re
import reprlib
import textwrap
from collections.abc import Callable, Hashable, Iterator, Sequence
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

from publisher.border.escape import for_terminal, is_hidden
from publisher.border.files import read_regular
from publisher.border.limits import LIMITS
from publisher.border.yaml_text import BoundedLoader
from publisher.errors import ManifestError
from publisher.manifest import architectures
from publisher.records import filenames
from publisher.records.files import packaged_folder

_ARTEFACTS = frozenset(name.casefold().partition("/")[0] for name in filenames.ALL)
TASK_TYPES = (
    "CAUSAL_LM",
    "FEATURE_EXTRACTION",
    "QUESTION_ANS",
    "SEQ_2_SEQ_LM",
    "SEQ_CLS",
    "TOKEN_CLS",
)


_PIN = "publish pin MANIFEST"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = 100

_REPO_ID = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
_COMMIT_ID = r"[0-9a-f]{40}"
_LICENSE = r"[a-z0-9][a-z0-9.+-]*"
_LAYERS = r"\d+(-\d+)?(, ?\d+(-\d+)?)*"
_PEM_BEGIN, _PEM_END = "-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"
_ELLIPTIC = bytes.fromhex("06072a8648ce3d0201")  # id-ecPublicKey, as DER writes it


def is_repo_id(text: str) -> bool:
    """True for owner/name as the Hub allows them."""
    return re.fullmatch(_REPO_ID, text) is not None and ".." not in text and "--" not in text


def _repo_id(text: str) -> str:
    if not is_repo_id(text):
        raise ValueError(f"{_shown(text)} is not a repository id; write it as owner/name")
    return text


def is_commit_id(text: str) -> bool:
    """True for a full commit id: 40 hexadecimal digits in small letters."""
    return re.fullmatch(_COMMIT_ID, text) is not None


def _commit_id(text: str) -> str:
    if is_commit_id(text):
        return text
    if re.fullmatch(_COMMIT_ID, text.lower()):
        raise ValueError(f"{_shown(text)} has capital letters; write the commit id in small ones")
    if re.fullmatch(r"[0-9a-fA-F]{41,}", text):
        raise ValueError(f"{_shown(text)} has {len(text)} digits where a commit id has 40; copy it again")
    if re.fullmatch(r"[0-9a-f]{7,39}", text):
        what = f"{_shown(text)} is an abbreviated commit id, which may come to mean another commit"
    else:
        what = f"{_shown(text)} is the name of a branch or tag, which may move"
    raise ValueError(f"{what}; pin the full commit id: {_PIN}")


def _local_path(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; write the checkpoint's folder, relative to the one you run publish in")
    _one_line(text)
    if text.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:", text):
        raise ValueError(
            f"{_shown(text)} is an absolute path, which others do not have; "
            "write it relative to the folder you run publish in (a symbolic link will do)"
        )
    return text


def _variant_path(text: str) -> str:
    if text == "/":
        return text
    parts = text.removesuffix("/").split("/")
    if text.startswith("/"):
        raise ValueError(f"{_shown(text)} is absolute; write / for the root or a subfolder such as flash/")
    if any(part in {"", ".", ".."} for part in parts):
        raise ValueError(f"{_shown(text)} leaves the repository or is not plain; write a subfolder such as flash/")
    if not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", part) for part in parts):
        raise ValueError(f"{_shown(text)} is not a plain folder name; use letters, digits, '.', '_' and '-'")
    taken = [part for part in parts if part.casefold() in _ARTEFACTS]
    if taken:
        raise ValueError(f"{taken[0]!r} is a name that this tool writes to; choose another folder")
    return "/".join(parts) + "/"


def _rank(value: Any) -> Any:
    if (
        value == "auto"
        or isinstance(value, Energy)
        or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
    ):
        return value
    share = value["energy"] if isinstance(value, dict) and value.keys() == {"energy"} else None
    if isinstance(share, float) and 0 < share < 1:
        return value
    raise ValueError(f"{_shown(value)} is not a rank; write a whole number above zero, auto, or {{energy: 0.95}}")


def _layers(value: Any) -> Any:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(_LAYERS, text, re.ASCII):
        raise ValueError(f"{_shown(value)} is not a range of layers; write such as 40-63 or 0-3, 7")
    runs = [[int(number) for number in run.split("-")] for run in text.split(",")]
    numbers = [number for run in runs for number in run]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"{_shown(value)} does not run upwards; write such as 40-63 or 0-3, 7")
    return ", ".join("-".join(map(str, run)) for run in runs)


def _identifier(text: str) -> str:
    if not text.isidentifier() or any(map(is_hidden, text)):
        raise ValueError(f"{_shown(text)} is not a class name; write it as in config.json's architectures")
    return text


def _task_type(value: Any) -> Any:
    if value is None:
        raise ValueError(f"is empty, and loaders go by it; use one of {', '.join(TASK_TYPES)}")
    if value not in TASK_TYPES:
        raise ValueError(f"{_shown(value)} is not a task type of PEFT; use one of {', '.join(TASK_TYPES)}")
    return value


def is_license(text: str) -> bool:
    """True for what looks like one of the Hub's licence identifiers."""
    return re.fullmatch(_LICENSE, text) is not None


def _license(text: str) -> str:
    if not is_license(text):
        raise ValueError(f"{_shown(text)} is not a licence identifier of the Hub; write it as apache-2.0")
    return text


def _public_key(text: str) -> str:
    """The key in the one form in which OpenSSL writes it, so that equal keys are equal texts."""
    if "PRIVATE KEY" in text:
        raise ValueError("holds a private key, which is for nobody else to see; make a new pair and put the public one")
    if not re.fullmatch(rf"\s*{_PEM_BEGIN}[A-Za-z0-9+/=\s]+{_PEM_END}\s*", text):
        raise ValueError(f"is no public key; write what `openssl pkey -in KEY -pubout` prints, from {_PEM_BEGIN} on")
    body = "".join(text.strip().removeprefix(_PEM_BEGIN).removesuffix(_PEM_END).split())
    try:
        der = base64.b64decode(body, validate=True)
    except binascii.Error:
        raise ValueError("is a public key that was cut or changed; copy it again, whole") from None
    if _ELLIPTIC not in der:
        raise ValueError("is not an elliptic curve key; make one on the curve prime256v1 (docs/signing.md)")
    return "\n".join([_PEM_BEGIN, *textwrap.wrap(base64.b64encode(der).decode(), 64), _PEM_END, ""])


def _issuer(text: str) -> str:
    if not re.fullmatch(r"https://[\w.-]+(:\d+)?(/[\w./-]*)?", text):
        raise ValueError(
            f"{_shown(text)} is not an issuer; write its address, https://token.actions.githubusercontent.com"
        )
    return text


def _request_file(text: str) -> str:
    _one_line(text)
    plain = all(part not in {"", ".", ".."} for part in text.split("/"))
    if not plain or text.startswith("~") or "\\" in text or re.match(r"[A-Za-z]:", text):
        raise ValueError(
            f"{_shown(text)} is not a plain path such as requests/set.jsonl; write it relative to the manifest's "
            "folder, or to the dataset's root (a symbolic link will do)"
        )
    return text


def _module_file(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*\.py", text, re.ASCII):
        raise ValueError(f"{_shown(text)} is not a module of the source repository; write it as joint_schema_model.py")
    return text


def _share(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{_shown(value)} is not a share; write a number from 0 to 1, such as 0.005")
    return float(value)


def _divergence(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{_shown(value)} is not a divergence; write a number of nats from 0 up, such as 0.01")
    return float(value)


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; write a few words")
    return _one_line(text.strip())  # a block of YAML ends with a line feed


def _one_line(text: str) -> str:
    """Return the text, or say which character keeps it from being one line that shows all that it holds."""
    hidden = next(filter(is_hidden, text), "")
    if hidden in {"\n", "\r"}:
        raise ValueError("has more than one line; write one line of plain text")
    if hidden:
        raise ValueError(f"holds a character that nobody sees, {for_terminal(hidden)}; write one line of plain text")
    return text


def _at_most(characters: int) -> Callable[[str], str]:
    def held(text: str) -> str:
        if len(text) > characters:
            raise ValueError(f"has {len(text):,} characters; write {characters:,} at most")
        return text

    return held


def _shown(value: Any) -> str:
    """A value as messages quote it: on one line, and short."""
    return "nothing" if value is None else _SHORT.repr(value)


def _pattern(text: str) -> Any:
    """For the JSON schema alone: the functions above give the better message."""
    return Field(json_schema_extra={"pattern": f"^{text}$"})


def _longest(characters: int) -> Any:
    """For the JSON schema alone, likewise."""
    return Field(json_schema_extra={"maxLength": characters})


RepoId = Annotated[str, AfterValidator(_repo_id), _pattern(_REPO_ID)]
CommitId = Annotated[str, AfterValidator(_commit_id), _pattern(_COMMIT_ID)]
Text = Annotated[str, AfterValidator(_text)]
Title = Annotated[Text, AfterValidator(_at_most(LIMITS.title_characters)), _longest(LIMITS.title_characters)]
Label = Annotated[Text, AfterValidator(_at_most(LIMITS.label_characters)), _longest(LIMITS.label_characters)]
Summary = Annotated[Text, AfterValidator(_at_most(LIMITS.summary_characters)), _longest(LIMITS.summary_characters)]

AUTHORS_WORDS = ("title", "label", "summary", "names of test sets")
"""What a card says that follows from no artefact. Each is one line of plain text, shown as such."""


class _Model(BaseModel):
    """Frozen and strict; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class Reference(_Model):
    """A checkpoint: a Hub repository at a full commit id, or a local folder."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["repo", "revision"]}, {"required": ["path"]}]})

    repo: RepoId | None = None
    """Repository on the Hub, as owner/name."""
    revision: CommitId | None = None
    """Full commit id of 40 digits; `publish pin` writes it."""
    path: Annotated[str, AfterValidator(_local_path)] | None = None
    """Local checkpoint folder, relative to the folder publish runs in; instead of repo and revision."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.path is not None and (self.repo or self.revision):
            raise ValueError("has both path and repo or revision; give repo and revision, or path alone")
        if self.path is None and self.repo is None:
            raise ValueError("names no checkpoint; give repo and revision, or path")
        if self.repo is not None and self.revision is None:
            raise ValueError(f"has a repo without a revision; pin it: {_PIN}")
        return self

    @property
    def where(self) -> str:
        """The reference as one string: what `from_pretrained` takes."""
        return self.path or self.repo or ""


class Energy(_Model):
    """A rank by the share of the update that it holds."""

    energy: Annotated[float, Field(gt=0, lt=1)]
    """Share of the update's squared norm that each module's factors hold at least, such as 0.95."""


class AdapterSettings(_Model):
    """How the adapter is made. Nothing has a hidden default but `ignore` and `carry`, which are empty."""

    method: Literal["svd", "exact"]
    """How the update is factored: svd, the best fit of its rank; exact, so that merging gives the released weights."""
    rank: Annotated[Annotated[int, Field(gt=0)] | Literal["auto"] | Energy, BeforeValidator(_rank)]
    """Rank of the adapter; auto: what stands above the merge's rounding; or {energy: 0.95}, for a full fine-tune."""
    dtype: Literal["bfloat16", "float32", "float16"]
    """Type in which the factors are stored."""
    layout: Literal["pattern", "uniform"]
    """pattern: narrower modules keep their own rank; uniform: all are padded with zeros to one rank."""
    task_type: Annotated[str, BeforeValidator(_task_type), Field(json_schema_extra={"enum": list(TASK_TYPES)})]
    """PEFT's task type, which decides the class that loaders build."""
    ignore: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Tensors (names, or patterns with *) that may differ and are left out; extraction.json and the card say so."""
    carry: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Tensors (likewise) that are no linear weights and are stored whole, with the module they belong to."""
    residual: bool = False
    """With method exact: the weights that a merge does not restore are kept in residual.safetensors."""
    exports: Annotated[tuple[Literal["gguf", "mlx"], ...], Field(strict=False)] = ()
    """Further formats, written beside the PEFT files: gguf for llama.cpp, mlx for mlx-lm."""

    @model_validator(mode="after")
    def _exports_are_of_a_lora(self) -> Self:
        if len(set(self.exports)) < len(self.exports):
            raise ValueError("exports names a format twice; keep one")
        if self.exports and self.carry:
            raise ValueError(
                f"exports {', '.join(self.exports)} cannot hold modules whole, as carry asks; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _residual_of_exact(self) -> Self:
        if self.residual and self.method != "exact":
            raise ValueError("residual is for method exact; write method: exact, or remove residual")
        if self.method == "exact" and isinstance(self.rank, Energy):
            raise ValueError(
                "method exact goes with an update of low rank; write a rank as a number or auto, or method: svd"
            )
        return self


class Expectation(_Model):
    """What the checkpoint must show; the run fails where it says otherwise."""

    linears: Annotated[int, Field(gt=0)] | None = None
    """How many linear modules the adapter has."""
    layers: Annotated[str, BeforeValidator(_layers), _pattern(_LAYERS)] | None = None
    """The layers that carry it, such as 40-63 or 0-3, 7."""


class Dataset(_Model):
    """A dataset repository on the Hub at a full commit id."""

    repo: RepoId
    """Dataset repository, as owner/name."""
    revision: CommitId
    """Full commit id of 40 digits; `publish pin` writes it."""


class Bounds(_Model):
    """What a comparison must keep to; the run fails where it does not. Without a bound the figure is only stated."""

    max_answers_changed: Annotated[float, BeforeValidator(_share)] | None = None
    """The largest share of answers that may change, such as 0.005."""
    max_kl: Annotated[float, BeforeValidator(_divergence)] | None = None
    """The largest Kullback-Leibler divergence of one question, in nats, such as 0.01."""


class RequestSet(Bounds):
    """One test set: a file of requests that both models answer."""

    name: Label
    """What readers of the card call this set: one line of plain text, 100 characters at most."""
    file: Annotated[str, AfterValidator(_request_file)]
    """JSON lines, gzip or not; relative to the folder in which you run publish, or to the dataset's root."""
    dataset: Dataset | None = None
    """Where the file is on the Hub; without it the file is local."""
    limit: Annotated[int, Field(gt=0)] | None = None
    """Take only so many requests from the file's beginning."""


class VerificationSettings(_Model):
    """How base + adapter is held against the released model."""

    runner: Literal["decision", "logits"]
    """decision: the source's own decision module; logits: the next token after each text, for any language model."""
    module: Annotated[str, AfterValidator(_module_file)] = "joint_schema_model.py"
    """The source repository's file with the decision functions; for the decision runner."""
    trust_remote_code: bool = False
    """The decision runner runs code of the source repository, at its pin: true allows that."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """In what the models run, usually what the release is stored in."""
    batch: Annotated[int, Field(gt=0)] = 8
    """Requests answered together; fewer take less memory. The same for both models, and part of the evidence."""
    sets: Annotated[tuple[RequestSet, ...], Field(strict=False, json_schema_extra={"minItems": 1})]
    """The test sets, one or more."""

    @field_validator("sets")
    @classmethod
    def _told_apart(cls, sets: tuple[RequestSet, ...]) -> tuple[RequestSet, ...]:
        if not sets:
            raise ValueError("is empty; list at least one test set")
        names = [one.name for one in sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sets are called {', '.join(twice)}; give each its own name")
        return sets

    @model_validator(mode="after")
    def _code_is_allowed(self) -> Self:
        if self.runner == "decision" and not self.trust_remote_code:
            raise ValueError(
                f"runs {self.module} of the source repository; read it at its pin, then write trust_remote_code: true"
            )
        return self


class Fp8Base(Reference, Bounds):
    """The FP8 release of the base, to see what the unchanged adapter does on it."""

    against: Literal["base", "release"] = "base"
    """base: compared with base + adapter; release: with the released model."""


class Variant(_Model):
    """One adapter: where it goes in the repository, what it comes from, how it is made."""

    path: Annotated[str, AfterValidator(_variant_path)]
    """Place in the repository: / for the root, or a subfolder such as flash/."""
    label: Label
    """What readers of the card call this variant: one line of plain text, 100 characters at most."""
    source: Reference
    """The merged fine-tune."""
    base: Reference
    """The model it was made from."""
    model_class: Annotated[str, AfterValidator(_identifier)]
    """Class of transformers that both are loaded with, as in config.json's architectures."""
    adapter: AdapterSettings
    """How the adapter is made."""
    expect: Expectation = Expectation()
    """What must be found; the run fails where it is not."""
    verification: VerificationSettings | None = None
    """How base + adapter is held against the released model; without it that is not done, and the card says so."""
    fp8: Fp8Base | None = None
    """The FP8 release of the base; the adapter is tried on it with the test sets of `verification`."""

    @model_validator(mode="after")
    def _fp8_has_sets(self) -> Self:
        if self.fp8 is not None and self.verification is None:
            raise ValueError("fp8 needs the test sets of a verification; add verification, or remove fp8")
        return self

    @model_validator(mode="after")
    def _exports_know_class(self) -> Self:
        for export in self.adapter.exports:
            if self.model_class not in (known := architectures.KNOWN[export]):
                raise ValueError(
                    f"adapter.exports: where {export} has the weights of {self.model_class} is not known here, only "
                    f"those of {', '.join(sorted(known))}; remove {export}"
                )
        return self

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
    """Template of the card: one that comes with the tool, or a file beside the manifest."""
    title: Title
    """The card's heading: one line of plain text, 200 characters at most."""
    summary: Summary
    """One sentence under the heading, in one line of plain text, 1,000 characters at most."""
    usage: Text = "usage_peft.md.j2"
    """Template of the part that shows how the adapter is loaded."""


class SigstoreSigner(_Model):
    """Who signs through Sigstore: both are told by the certificate that Sigstore gives the signer."""

    identity: Text
    """The signer, such as https://github.com/OWNER/NAME/.github/workflows/release.yml@refs/tags/v1.2.0."""
    issuer: Annotated[str, AfterValidator(_issuer)]
    """Who vouches for that identity, such as https://token.actions.githubusercontent.com."""


class Signer(_Model):
    """Who must have signed the release: the holder of a key, or an identity that Sigstore knows."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["key"]}, {"required": ["sigstore"]}]})

    key: Annotated[str, AfterValidator(_public_key)] | None = None
    """Public key of the signer, the PEM text itself; the private one is named on the command line."""
    sigstore: SigstoreSigner | None = None
    """Who signs through Sigstore; instead of key."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.key is not None and self.sigstore is not None:
            raise ValueError("names two signers; give key or sigstore, one of them")
        if self.key is None and self.sigstore is None:
            raise ValueError("names no signer; give key or sigstore")
        return self


class Manifest(_Model):
    """The whole manifest, version 1."""

    version: Literal[1]
    """Version of the manifest's format: 1."""
    repo: RepoId
    """Repository that is published, as owner/name."""
    license: Annotated[str, AfterValidator(_license), _pattern(_LICENSE)]
    """Licence identifier of the Hub, such as apache-2.0."""
    variants: Annotated[tuple[Variant, ...], Field(strict=False, json_schema_extra={"minItems": 1})]
    """The adapters, one or more."""
    card: CardSettings
    """What the card says that no artefact can know."""
    sign: Signer | None = None
    """Who signs the release; without it there is no signature."""

    @field_validator("variants")
    @classmethod
    def _one_variant_per_path(cls, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        if not variants:
            raise ValueError("is empty; list at least one variant")
        seen: dict[str, str] = {}
        for path in (variant.path for variant in variants):
            other = seen.setdefault(path.casefold(), path)
            if other != path:
                raise ValueError(f"paths {other} and {path} differ in case alone, which some disks cannot; rename one")
        paths = [variant.path for variant in variants]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise ValueError(f"two variants are at path {', '.join(twice)}; give each its own")
        return variants

    @property
    def is_local(self) -> bool:
        """True where a reference is a local folder: nobody else could check what is published."""
        return any(ref.path is not None for v in self.variants for ref in (v.source, v.base, v.fp8) if ref is not None)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with one manifest."""

    file: Path
    field: str
    what: str

    def __str__(self) -> str:
        place = f"{self.file}: {self.field}" if self.field else f"{self.file}"
        return for_terminal(f"{place}: {self.what}")


def load_manifest(path: Path) -> Manifest:
    """Read one manifest.

    Raises:
        ManifestError: naming every problem of the file, a line each.
    """
    manifest, problems = read_manifest(path)
    if manifest is None:
        raise manifest_error(problems)
    return manifest


def read_manifest(path: Path, *, templates: bool = True) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """The manifest, or every problem that keeps it from being one; never both.

    Without `templates` it is none that the card's templates are not there: whoever reads a release has no use for them.
    """
    text, problems = read_text(path)
    return (None, problems) if text is None else parse_manifest(path, text, templates=templates)


def read_text(path: Path) -> tuple[str | None, tuple[Problem, ...]]:
    """The file's text with its line ends as they are, or the problem that keeps it from being read."""
    try:
        return read_regular(path, limit=LIMITS.yaml_bytes).decode(), ()
    except FileNotFoundError:
        return None, (Problem(path, "", "no such file; write one with: publish new --source A --base B"),)
    except UnicodeDecodeError:
        return None, (Problem(path, "", "is not text in UTF-8; give a YAML file"),)
    except OSError as error:
        return None, (Problem(path, "", f"cannot be read ({error.strerror}); give a YAML file"),)


def parse_manifest(path: Path, text: str, *, templates: bool = True) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """As `read_manifest`, from the text that the file holds or is about to hold."""
    data, problems = _parse_yaml(path, text)
    if data is None:
        return None, problems
    foreign = _version_problems(path, data)
    if foreign:
        return None, foreign
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        found = (_problem(path, details) for details in error.errors(include_url=False))
        return None, (*problems, *found, *(_template_problems(path, data) if templates else ()))
    problems = (*problems, *(_template_problems(path, data) if templates else ()))
    return (None, problems) if problems else (manifest, ())


def manifest_error(problems: Sequence[Problem]) -> ManifestError:
    """The error that names all these problems, a line each."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ManifestError(f"{count} in the manifest:\n" + "\n".join(f"  {problem}" for problem in problems))


def _version_problems(path: Path, data: dict[Hashable, Any]) -> tuple[Problem, ...]:
    """Another version has other fields: nothing else that could be said of the file would be true."""
    version = data.get("version", 1)
    if isinstance(version, int) and not isinstance(version, bool) and version != 1:
        advice = "install a newer publisher" if version > 1 else "write version: 1"
        return (Problem(path, "version", f"is {version}, and this publisher reads version 1; {advice}"),)
    return ()


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
        return None, (Problem(path, "", f"is {_kind(data)}, not a mapping of fields; see docs/manifest.md"),)
    return data, problems


def _duplicates(path: Path, root: yaml.Node) -> Iterator[Problem]:
    """Keys that stand twice in one mapping, of which PyYAML would silently keep the last."""
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
            yield Problem(path, _dotted((*place, str(key.value))), what)
        seen.add(key.value)


def _yaml_complaint(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        what = (error.problem or "cannot be read").removeprefix("but ")
        return f"{what} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


# --- pydantic's complaints in our words ---------------------------------------------------------------------


def _problem(path: Path, details: ErrorDetails) -> Problem:
    what = _EXPLANATIONS.get(details["type"], _otherwise)(details)
    return Problem(path, _dotted(details["loc"]), what.replace(_PIN, f"publish pin {path}"))


def _dotted(loc: Sequence[int | str]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _otherwise(details: ErrorDetails) -> str:
    return f"is {_kind(details['input'])}: {details['msg'][:1].lower()}{details['msg'][1:]}; see docs/manifest.md"


def _wrong_kind(expected: str) -> Callable[[ErrorDetails], str]:
    return lambda details: f"is {_kind(details['input'])} where {expected} belongs; see docs/manifest.md"


def _not_text(details: ErrorDetails) -> str:
    given = details["input"]
    if given is None:
        return "is empty; write a value after the colon"
    if isinstance(given, list | dict):
        return f"is {_kind(given)} where text belongs; see docs/manifest.md"
    return f"is read by YAML as {_kind(given)}; put it in quotes"


def _kind(given: Any) -> str:
    """What a YAML value is, in words, and the value itself where it is short."""
    if given is None:
        return "empty"
    if isinstance(given, list | dict):
        return "a list" if isinstance(given, list) else "a mapping"
    if isinstance(given, bool):
        return str(given).lower()
    name = {int: "the number", float: "the number", str: "the text"}.get(type(given), f"a {type(given).__name__}")
    return f"{name} {_shown(given)}"


def _unknown_key(details: ErrorDetails) -> str:
    *place, key = map(str, details["loc"])
    holder = next((name for name in reversed(place) if not name.isdigit()), "")
    here = list(_MODELS[holder].model_fields)
    close = difflib.get_close_matches(key, here, n=1)
    elsewhere = [name for name, model in _MODELS.items() if name and key in model.model_fields]
    if close:
        return f"is not a known field; did you mean {close[0]}?"
    if elsewhere:
        return f"is not a field here; it belongs under {' or '.join(elsewhere)}"
    return f"is not a known field; remove it (the fields here are {', '.join(here)})"


def _wrong_choice(details: ErrorDetails) -> str:
    allowed = details.get("ctx", {}).get("expected", "")
    return f"{_shown(details['input'])} is not possible here; use {allowed.replace(chr(39), '')}"


_MODELS: dict[str, type[BaseModel]] = {
    "": Manifest,
    "variants": Variant,
    "source": Reference,
    "base": Reference,
    "adapter": AdapterSettings,
    "expect": Expectation,
    "verification": VerificationSettings,
    "sets": RequestSet,
    "dataset": Dataset,
    "fp8": Fp8Base,
    "card": CardSettings,
    "sign": Signer,
    "sigstore": SigstoreSigner,
}

_EXPLANATIONS: dict[str, Callable[[ErrorDetails], str]] = {
    "missing": lambda details: f"is missing; add {details['loc'][-1]}: (docs/manifest.md shows each field)",
    "extra_forbidden": _unknown_key,
    "invalid_key": _unknown_key,
    "literal_error": _wrong_choice,
    "string_type": _not_text,
    "int_type": _wrong_kind("a whole number"),
    "bool_type": _wrong_kind("true or false"),
    "greater_than": lambda details: f"is {_shown(details['input'])}; write a whole number above zero",
    "model_type": _wrong_kind("a mapping of fields"),
    "tuple_type": _wrong_kind("a list"),
    "value_error": lambda details: str(details["msg"]).removeprefix("Value error, "),
}
