"""The types of a manifest's fields: what each may hold, and what is said where it holds something else.

Each type stands below the function that checks it. A check raises ValueError, in words that say what to write.
"""

import base64
import binascii
import math
import re
import reprlib
import textwrap
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

from publisher.border.escape import for_terminal, is_hidden
from publisher.border.limits import LIMITS
from publisher.records import filenames

_ARTEFACTS = frozenset(name.casefold().partition("/")[0] for name in filenames.ALL)
TASK_TYPES = (
    "CAUSAL_LM",
    "FEATURE_EXTRACTION",
    "QUESTION_ANS",
    "SEQ_2_SEQ_LM",
    "SEQ_CLS",
    "TOKEN_CLS",
)
PIN = "publish pin MANIFEST"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = 100
_REPO_ID = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
_COMMIT_ID = r"[0-9a-f]{40}"
_LICENSE = r"[a-z0-9][a-z0-9.+-]*"
_LAYERS = r"\d+(-\d+)?(, ?\d+(-\d+)?)*"
_PEM_BEGIN, _PEM_END = "-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"
_ELLIPTIC = bytes.fromhex("06072a8648ce3d0201")  # id-ecPublicKey, as DER writes it


def quoted(value: Any) -> str:
    """Return a value as messages quote it: on one line, and short."""
    return "nothing" if value is None else _SHORT.repr(value)


def _pattern(text: str) -> Any:
    """Return a pattern that stands in the JSON schema alone: the validators give the better message."""
    return Field(json_schema_extra={"pattern": f"^{text}$"})


def _one_line(text: str) -> str:
    """Return the text, or say which character keeps it from being one line that shows all that it holds."""
    hidden = next(filter(is_hidden, text), "")
    if hidden in {"\n", "\r"}:
        raise ValueError("has more than one line; write one line of plain text")
    if hidden:
        raise ValueError(f"holds a character that nobody sees, {for_terminal(hidden)}; write one line of plain text")
    return text


def is_repo_id(text: str) -> bool:
    """Return whether the text is an owner/name as the Hub allows them."""
    return re.fullmatch(_REPO_ID, text) is not None and ".." not in text and "--" not in text


def _repo_id(text: str) -> str:
    if not is_repo_id(text):
        raise ValueError(f"{quoted(text)} is not a repository id; write it as owner/name")
    return text


RepoId = Annotated[str, AfterValidator(_repo_id), _pattern(_REPO_ID)]
"""A repository on the Hub, as owner/name."""


def is_commit_id(text: str) -> bool:
    """Return whether the text is a full commit id: 40 hexadecimal digits in small letters."""
    return re.fullmatch(_COMMIT_ID, text) is not None


def _commit_id(text: str) -> str:
    if is_commit_id(text):
        return text
    if re.fullmatch(_COMMIT_ID, text.lower()):
        raise ValueError(f"{quoted(text)} has capital letters; write the commit id in small ones")
    if re.fullmatch(r"[0-9a-fA-F]{41,}", text):
        raise ValueError(f"{quoted(text)} has {len(text)} digits where a commit id has 40; copy it again")
    if re.fullmatch(r"[0-9a-f]{7,39}", text):
        what = f"{quoted(text)} is an abbreviated commit id, which may come to mean another commit"
    else:
        what = f"{quoted(text)} is the name of a branch or tag, which may move"
    raise ValueError(f"{what}; pin the full commit id: {PIN}")


CommitId = Annotated[str, AfterValidator(_commit_id), _pattern(_COMMIT_ID)]
"""A full commit id: 40 hexadecimal digits in small letters."""


def _local_path(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; write the checkpoint's folder, relative to the one you run publish in")
    _one_line(text)
    if text.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:", text):
        raise ValueError(
            f"{quoted(text)} is an absolute path, which others do not have; "
            "write it relative to the folder you run publish in (a symbolic link will do)"
        )
    return text


LocalPath = Annotated[str, AfterValidator(_local_path)]
"""A folder of this machine, relative to the one that publish runs in."""


def _variant_path(text: str) -> str:
    if text == "/":
        return text
    parts = text.removesuffix("/").split("/")
    if text.startswith("/"):
        raise ValueError(f"{quoted(text)} is absolute; write / for the root or a subfolder such as flash/")
    if any(part in {"", ".", ".."} for part in parts):
        raise ValueError(f"{quoted(text)} leaves the repository or is not plain; write a subfolder such as flash/")
    if not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", part) for part in parts):
        raise ValueError(f"{quoted(text)} is not a plain folder name; use letters, digits, '.', '_' and '-'")
    taken = [part for part in parts if part.casefold() in _ARTEFACTS]
    if taken:
        raise ValueError(f"{taken[0]!r} is a name that this tool writes to; choose another folder")
    return "/".join(parts) + "/"


VariantPath = Annotated[str, AfterValidator(_variant_path)]
"""A place in the repository: `/`, or a plain subfolder with a slash at its end."""


def _layers(value: Any) -> Any:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(_LAYERS, text, re.ASCII):
        raise ValueError(f"{quoted(value)} is not a range of layers; write such as 40-63 or 0-3, 7")
    runs = [[int(number) for number in run.split("-")] for run in text.split(",")]
    numbers = [number for run in runs for number in run]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"{quoted(value)} does not run upwards; write such as 40-63 or 0-3, 7")
    return ", ".join("-".join(map(str, run)) for run in runs)


Layers = Annotated[str, BeforeValidator(_layers), _pattern(_LAYERS)]
"""Numbers of layers, rising, such as `40-63` or `0-3, 7`."""


def _identifier(text: str) -> str:
    if not text.isidentifier() or any(map(is_hidden, text)):
        raise ValueError(f"{quoted(text)} is not a class name; write it as in config.json's architectures")
    return text


ClassName = Annotated[str, AfterValidator(_identifier)]
"""The name of a class of transformers."""


class Section(BaseModel):
    """A mapping of fields in a manifest: frozen and strict, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class Energy(Section):
    """A rank by the share of the update that it holds."""

    energy: Annotated[float, Field(gt=0, lt=1)]
    """Share of the update's squared norm that each module's factors hold at least, such as 0.95."""


def _rank(value: Any) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if is_number or value == "auto" or isinstance(value, Energy):
        return value
    share = value["energy"] if isinstance(value, dict) and value.keys() == {"energy"} else None
    if isinstance(share, float) and 0 < share < 1:
        return value
    raise ValueError(f"{quoted(value)} is not a rank; write a whole number above zero, auto, or {{energy: 0.95}}")


Rank = Annotated[PositiveInt | Literal["auto"] | Energy, BeforeValidator(_rank)]
"""A whole number above zero, `auto`, or the share of the update that it must hold."""


def _task_type(value: Any) -> Any:
    if value is not None and value not in TASK_TYPES:
        raise ValueError(
            f"{quoted(value)} is not a task type of PEFT; use one of {', '.join(TASK_TYPES)}, or leave it out"
        )
    return value


TaskType = Annotated[str | None, BeforeValidator(_task_type), Field(json_schema_extra={"enum": [*TASK_TYPES, None]})]
"""One of PEFT's task types; none for a class whose inputs no task's wrapper hands on, as Whisper's."""


def is_license(text: str) -> bool:
    """Return whether the text looks like one of the Hub's licence identifiers."""
    return re.fullmatch(_LICENSE, text) is not None


def _license(text: str) -> str:
    if not is_license(text):
        raise ValueError(f"{quoted(text)} is not a licence identifier of the Hub; write it as apache-2.0")
    return text


License = Annotated[str, AfterValidator(_license), _pattern(_LICENSE)]
"""A licence identifier of the Hub."""


def _public_key(text: str) -> str:
    """Return the key in the one form in which OpenSSL writes it, so that equal keys are equal texts."""
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


PublicKey = Annotated[str, AfterValidator(_public_key)]
"""A public key on an elliptic curve, as PEM text."""


def _issuer(text: str) -> str:
    if not re.fullmatch(r"https://[\w.-]+(:\d+)?(/[\w./-]*)?", text):
        raise ValueError(
            f"{quoted(text)} is not an issuer; write its address, https://token.actions.githubusercontent.com"
        )
    return text


Issuer = Annotated[str, AfterValidator(_issuer)]
"""The https address of an OpenID Connect issuer."""


def _request_file(text: str) -> str:
    _one_line(text)
    plain = all(part not in {"", ".", ".."} for part in text.split("/"))
    if not plain or text.startswith("~") or "\\" in text or re.match(r"[A-Za-z]:", text):
        raise ValueError(
            f"{quoted(text)} is not a plain path such as requests/set.jsonl; write it relative to the manifest's "
            "folder, or to the dataset's root (a symbolic link will do)"
        )
    return text


RequestPath = Annotated[str, AfterValidator(_request_file)]
"""A plain relative path of a request file."""


def _module_file(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*\.py", text, re.ASCII):
        raise ValueError(f"{quoted(text)} is not a module of the source repository; write it as joint_schema_model.py")
    return text


ModuleFile = Annotated[str, AfterValidator(_module_file)]
"""The file name of a Python module at the root of a repository."""


def _share(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{quoted(value)} is not a share; write a number from 0 to 1, such as 0.005")
    return float(value)


Share = Annotated[float, BeforeValidator(_share)]
"""A number from 0 to 1."""


def _divergence(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{quoted(value)} is not a divergence; write a number of nats from 0 up, such as 0.01")
    return float(value)


Divergence = Annotated[float, BeforeValidator(_divergence)]
"""A Kullback-Leibler divergence in nats, from 0 up."""


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; write a few words")
    return _one_line(text.strip())  # a block of YAML ends with a line feed


Text = Annotated[str, AfterValidator(_text)]
"""One line of plain text, never empty."""


AUTO: Final = "auto"


def _carry(value: Any) -> Any:
    if isinstance(value, str) and value != AUTO:
        raise ValueError(f"{quoted(value)} is no list of tensors; write {AUTO}, or a list of names and patterns")
    return value


Carry = Annotated[Annotated[tuple[Text, ...], Field(strict=False)] | Literal["auto"], BeforeValidator(_carry)]
"""Names or patterns of tensors, or `auto`."""


def _at_most(characters: int) -> Callable[[str], str]:
    def bounded(text: str) -> str:
        if len(text) > characters:
            raise ValueError(f"has {len(text):,} characters; write {characters:,} at most")
        return text

    return bounded


def _longest(characters: int) -> Any:
    """Return a length that stands in the JSON schema alone: the validators give the better message."""
    return Field(json_schema_extra={"maxLength": characters})


Title = Annotated[Text, AfterValidator(_at_most(LIMITS.title_characters)), _longest(LIMITS.title_characters)]
Label = Annotated[Text, AfterValidator(_at_most(LIMITS.label_characters)), _longest(LIMITS.label_characters)]
Summary = Annotated[Text, AfterValidator(_at_most(LIMITS.summary_characters)), _longest(LIMITS.summary_characters)]
AUTHORS_WORDS = ("title", "label", "summary", "names of test sets")
"""What a card says that follows from no artefact. Each is one line of plain text, shown as such."""
