"""Request files, the content of the manifest's test sets: JSON lines, gzip or not, that two models are asked to answer.

A line for the decision runner is a row of the Decision Index or a plain SystemOne request; one for the logits runner
is `{"id", "text", "images"?}`. Reading refuses a line that is no such request, by file, line number and field, before
any model is loaded; and an image that is not there. It needs no network and no torch.

Of the three types of question in a decision request, a `choice` has named options, a `score` has ordered levels, and a
`noul`, which is the Decision Index's word, is answered by yes or no. A text has one question of the type `token`.
"""

import base64
import binascii
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from PIL import Image, UnidentifiedImageError

from publisher.border.files import open_regular, read_regular
from publisher.border.json_text import parse_json_object
from publisher.border.limits import LIMITS
from publisher.border.paths import repository_path
from publisher.errors import VerificationError, shown
from publisher.records.checkpoint import FileDigest
from publisher.records.files import digest_of, sha256_of
from publisher.records.validation import Kind

Runner = Literal["decision", "logits"]
"""How a model is asked: by the source's own decision module, or for the token after each text."""
_GZIP = b"\x1f\x8b"
_DATA = "data:"
_OPTIONS = (2, 255)  # the least and the most that a choice has
_LEVELS = (2, 10)  # and a score


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a request.

    Attributes:
        id: the question's id in its request.
        kind: its type.
        gold: index of the right option, counted from 0 in the order of the logits; None where it is not known.
    """

    id: str
    kind: Kind
    gold: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a request file: what a model is given at once, with one question or more.

    Attributes:
        id: the line's own id, or `line N`.
        benchmark: the benchmark that it is part of; empty where the line does not say.
        questions: the questions in the line's order, which is that of the answers.
        body: what the model is given, never the right answers; images in it are paths or data URLs.
        folder: where paths of images start.
    """

    id: str
    benchmark: str
    questions: tuple[Question, ...]
    body: Mapping[str, Any]
    folder: Path

    def images(self) -> list[Image.Image]:
        """Open the images of the request, as RGB."""
        return [_image(reference, self.folder) for reference in self.body.get("images") or ()]

    def self_contained(self) -> "Request":
        """Return the request with the content of its images in it, for a machine that lacks their files."""
        images = self.body.get("images")
        if not images:
            return self
        return replace(self, body={**self.body, "images": [_data_url(one, self.folder) for one in images]})


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A request file that was read.

    Attributes:
        digest: name and digest of the file.
        requests: its requests in the order of the lines, as far as the limit lets them in.
        content: digest of the file, of the limit, and of the images that the requests name by path.
    """

    digest: FileDigest
    requests: tuple[Request, ...]
    content: str


class _FieldError(Exception):
    """What is wrong with one field of a line."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(what)
        self.field, self.what = field, what


def read_request_file(path: Path, *, name: str, runner: Runner, limit: int | None = None) -> RequestFile:
    """Read and check a request file.

    Args:
        path: the file on this machine.
        name: what the manifest calls the file, for the record.
        runner: which runner the requests are for.
        limit: take only so many requests from the file's beginning; None takes all.

    Returns:
        The requests, and the digests of all that they rest on.

    Raises:
        VerificationError: the file is missing, damaged or empty, or a line is no request.
    """
    if not path.is_file():
        raise VerificationError(f"there is no request file {path}", next_step="correct file in the manifest's set")
    requests: list[Request] = []
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        if len(requests) == limit:
            break
        try:
            request = _request(line, number=number, runner=runner, folder=path.parent)
            _require_new(request.id, seen)
        except _FieldError as error:
            raise VerificationError(
                f"{path}, line {number}: {error.field or 'the line'} {error.what}", next_step="correct that line"
            ) from None
        seen[request.id] = number
        requests.append(request)
    if not requests:
        raise VerificationError(f"{path} holds no request", next_step="correct file in the manifest's set")
    images = sorted({file for request in requests for file in _image_files(request)})
    digests = [sha256_of(file) for file in images]
    digest = FileDigest.of(path, name=name)
    return RequestFile(digest, tuple(requests), digest_of([digest.sha256, limit, digests]))


def _require_new(id_: str, seen: dict[str, int]) -> None:
    if id_ in seen:
        raise _FieldError("id", f"is {shown(id_)}, as on line {seen[id_]}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that hold something, with their numbers, none longer than a request may be."""
    try:
        with open_regular(path) as raw:
            packed = raw.peek(len(_GZIP))[: len(_GZIP)] == _GZIP
            with gzip.GzipFile(fileobj=raw) if packed else raw as stream:
                for number, line in enumerate(_bounded_lines(stream), start=1):
                    if line.strip():
                        yield number, line
    except (OSError, EOFError, ValueError, zlib.error) as error:  # a damaged gzip is an OSError
        raise VerificationError(
            f"{path} is damaged: {error}", expected="JSON lines in UTF-8, gzip or not", next_step="fetch it again"
        ) from None


def _bounded_lines(stream: BufferedReader | gzip.GzipFile) -> Iterator[bytes]:
    total = 0
    while line := stream.readline(LIMITS.request_line_bytes + 1):
        total += len(line)
        if len(line) > LIMITS.request_line_bytes:
            raise ValueError(f"a line has more than {LIMITS.request_line_bytes:,} bytes")
        if total > LIMITS.request_file_bytes:
            raise ValueError(f"it holds more than {LIMITS.request_file_bytes:,} bytes")
        yield line


# --- one line -----------------------------------------------------------------------------------------------


def _request(line: bytes, *, number: int, runner: Runner, folder: Path) -> Request:
    try:
        row = parse_json_object(line)
    except ValueError as error:
        raise _FieldError("", f"cannot be read as JSON: {error}") from None
    asked = (Question("next token", "token"),) if runner == "logits" else _questions(row)
    request = Request(
        id=_text(row, "id", default=f"line {number}"),
        benchmark=_text(row, "family", default=""),
        questions=asked,
        body=_text_body(row) if runner == "logits" else _decision_body(row),
        folder=folder,
    )
    _require_images(request)
    return request


def _text(row: dict[str, Any], field: str, *, default: str) -> str:
    value = row.get(field, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise _FieldError(field, f"is {shown(value)}, not text")
    return value


def _text_body(row: dict[str, Any]) -> dict[str, Any]:
    text = row.get("text")
    if not isinstance(text, str) or not text:
        raise _FieldError("text", f"is {shown(text)}; write the text whose next token is compared")
    return {name: row[name] for name in ("text", "images") if name in row}


def _decision_body(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a model is shown: never the right answers."""
    if "state" not in row:
        raise _FieldError("state", "is missing")
    return {name: row[name] for name in ("model", "state", "questions", "images", "videos") if name in row}


def _questions(row: dict[str, Any]) -> tuple[Question, ...]:
    asked = row.get("questions")
    expected = row.get("expected") or {}
    if not isinstance(asked, dict) or not asked:
        raise _FieldError("questions", f"is {shown(asked)}, not a mapping of questions")
    if not isinstance(expected, dict):
        raise _FieldError("expected", f"is {shown(expected)}, not a mapping of right answers")
    return tuple(_question(id_, one, expected=expected.get(id_)) for id_, one in asked.items())


def _question(id_: str, question: Any, *, expected: Any) -> Question:
    where = f"questions.{id_}"
    kind = question.get("type") if isinstance(question, dict) else None
    if kind not in {"noul", "choice", "score"}:
        raise _FieldError(f"{where}.type", f"is {shown(kind)}, not noul, choice or score")
    options = _options(where, kind, criteria=question.get("criteria"))
    if expected is None:
        return Question(id_, kind)
    index = _index(expected, options, kind=kind)
    if not 0 <= index < len(options):
        raise _FieldError(f"expected.{id_}", f"is {shown(expected)}, none of the options")
    return Question(id_, kind, index)


def _index(expected: Any, options: list[Any], *, kind: Kind) -> int:
    """Return the index of the right answer among the options, -1 or beyond where it is none of them.

    A line gives an option itself, or a level (2.0 is level 2), or for a noul true or false, 1 or 0.
    """
    if kind == "choice" or not isinstance(expected, int | float):
        return options.index(expected) if expected in options else -1
    level = int(expected) if math.isfinite(expected) and expected == int(expected) else -1
    return 1 - level if kind == "noul" else level


def _options(where: str, kind: Kind, *, criteria: Any) -> list[Any]:
    """Return the options in the order of the logits: a choice's are sorted by id, and yes comes before no."""
    if kind == "noul":
        return ["yes", "no"]
    form, (least, most) = (dict, _OPTIONS) if kind == "choice" else (list, _LEVELS)
    if not isinstance(criteria, form) or not least <= len(criteria) <= most:
        what = f"a {'mapping' if form is dict else 'list'} of {least} to {most}"
        raise _FieldError(f"{where}.criteria", f"is {shown(criteria)}, not {what}")
    return sorted(criteria) if kind == "choice" else list(criteria)


# --- images -------------------------------------------------------------------------------------------------


def _require_images(request: Request) -> None:
    images = request.body.get("images")
    if images is not None and not (isinstance(images, list) and all(isinstance(one, str) for one in images)):
        raise _FieldError("images", "is not a list of paths or data URLs")
    for index, file in enumerate(images or ()):
        try:
            _image(file, request.folder)
        except FileNotFoundError:
            raise _FieldError(f"images[{index}]", f"{shown(file)} does not exist") from None
        except (OSError, ValueError, UnidentifiedImageError) as error:
            raise _FieldError(f"images[{index}]", f"is no image ({str(error)[:80]})") from None


def _image(reference: str, folder: Path) -> Image.Image:
    if reference.startswith(_DATA):
        head, _, packed = reference.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data URL is base64 here")
        try:
            content = io.BytesIO(base64.b64decode(packed, validate=True))
        except binascii.Error as error:
            raise ValueError(str(error)) from None
    else:
        content = io.BytesIO(_image_bytes(folder, reference))
    with Image.open(content) as image:
        return image.convert("RGB")


def _image_bytes(folder: Path, reference: str) -> bytes:
    """Return the content of an image beside the request file, which names no other file of this machine."""
    return read_regular(folder / repository_path(reference), limit=LIMITS.image_bytes)


def _data_url(reference: str, folder: Path) -> str:
    if reference.startswith(_DATA):
        return reference
    return f"{_DATA};base64,{base64.b64encode(_image_bytes(folder, reference)).decode()}"


def _image_files(request: Request) -> Iterator[Path]:
    for reference in request.body.get("images") or ():
        if not reference.startswith(_DATA):
            yield request.folder / reference
