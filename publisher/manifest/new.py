"""`publish new`: a first manifest, written after reading the headers of both checkpoints.

Names, dtypes and shapes are read, on the Hub by range requests; no weight is. It refuses a pair that cannot be a base
and its fine-tune: no weight in common, or weights of different shapes. What no checkpoint can tell, the text marks with
`edit:`.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from publisher.border.files import read_text
from publisher.border.safetensors_header import DTYPES, LORA_DTYPES
from publisher.checkpoints.card_fields import CARD, card_fields
from publisher.checkpoints.files import INDEX, MODEL_CONFIG, SINGLE, read_config, shards_of, weight_entry
from publisher.checkpoints.headers import read_headers
from publisher.checkpoints.remote_headers import remote_entries, text_on_hub
from publisher.checkpoints.tensor_formats import Described
from publisher.checkpoints.wrappers import unwrapped
from publisher.errors import ExtractionError, PublisherError
from publisher.hub import client as hub
from publisher.manifest.fields import is_commit_id, is_license, is_repo_id
from publisher.manifest.pin import DEFAULT_BRANCH
from publisher.manifest.task_types import heads_of, task_type_of
from publisher.records.checkpoint import Checkpoint

_SHOWN = 10

_MANIFEST = """\
# Written by `publish new` from the headers of both checkpoints: {weights} weight matrices in common, in equal shapes.
# docs/manifest.md explains each field. After editing: publish check THIS_FILE
version: 1
repo: your-name/{slug}-lora # edit: the repository to publish
license: {license}
variants:
  - path: / # the root of the repository; a second variant would go into a subfolder
    label: {label}
    source: # the merged fine-tune
{source}
    base: # the model it was made from
{base}
    model_class: {model_class} # from the source's config.json
    adapter:
      method: svd
      rank: auto # what stands above the merge's rounding; or a number, where you know it
      dtype: {dtype} # as most tensors of the source
      layout: pattern # or uniform: every module padded with zeros to one rank
      task_type: {task_type}
    # Once you know what is in there, say so, and a run that finds anything else fails:
    # expect: {{linears: 186, layers: 40-63}}
card:
  template: lora_card.md.j2
  title: {slug}-lora
  summary: The LoRA adapter inside {slug}, taken back out of its merged weights. # edit: one sentence
"""

_Headers = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What a manifest needs to know of a checkpoint.

    Attributes:
        shown: what messages call it.
        name: the last part of its folder or repository.
        reference: the fields of its reference in the manifest: path, or repo and revision.
        headers: dtype and shape of each tensor, by name.
    """

    shown: str
    name: str
    reference: dict[str, str]
    headers: _Headers


def new_manifest(*, base: str, tuned: str) -> str:
    """Return the text of a manifest for two checkpoints, after reading their headers.

    Args:
        base: the model that the fine-tune was made from: a local folder, or `owner/name` or `owner/name@revision` on
            the Hub.
        tuned: the merged fine-tune, named in the same way.

    Raises:
        ExtractionError: no weight matrix in common, or shapes that differ (the first ten are named).
        FetchError: a checkpoint is missing or damaged.
        HubError: a checkpoint is out of reach.
        PublisherError: a config.json without architectures, or no tensor in a dtype an adapter can have.
    """
    fine_tune = _checkpoint(tuned)
    original = _checkpoint(base)
    config = _config(fine_tune)
    model_class = _model_class(config, fine_tune)
    task_type = task_type_of(model_class, config)
    weights = _common_weights(base=original, tuned=fine_tune, task_type=task_type)
    return _MANIFEST.format(
        weights=weights,
        slug=_slug(fine_tune.name),
        license=_license_line(fine_tune),
        label=_scalar(fine_tune.name),
        source=_reference_lines(fine_tune),
        base=_reference_lines(original),
        model_class=model_class,
        dtype=_dtype(fine_tune),
        task_type=task_type or "null # no wrapper of PEFT fits this class",
    )


# --- reading ------------------------------------------------------------------------------------------------


def _checkpoint(text: str) -> _Checkpoint:
    repo, _, revision = text.partition("@")
    if Path(text).is_dir() or not is_repo_id(repo):
        return _local(Path(text))
    return _remote(repo, revision or DEFAULT_BRANCH)


def _local(folder: Path) -> _Checkpoint:
    headers = _by_short_name(read_headers(folder))
    relative = Path(os.path.relpath(folder)).as_posix()
    return _Checkpoint(str(folder), folder.resolve().name, {"path": relative}, headers)


def _remote(repo: str, revision: str) -> _Checkpoint:
    commit = revision if is_commit_id(revision) else hub.resolve_revision(repo, revision)
    checkpoint = Checkpoint(kind="hub", name=repo, revision=commit, files=())
    sizes = {file.path: file.size for file in hub.list_files(repo, commit)}
    entry = weight_entry(sizes, where=checkpoint.short, beside=text_on_hub(repo, commit))
    files = (SINGLE,) if entry == SINGLE else shards_of(hub.download(repo, commit, filename=INDEX))
    config = read_config(hub.download(repo, commit, filename=MODEL_CONFIG).parent)
    entries = remote_entries(checkpoint, files, sizes=sizes, config=config)
    headers = _by_short_name(entries)
    return _Checkpoint(checkpoint.short, repo.partition("/")[2], {"repo": repo, "revision": commit}, headers)


def _by_short_name(described: Mapping[str, Described]) -> _Headers:
    short = unwrapped(described)
    return {short[name]: (one.dtype, one.shape) for name, one in described.items()}


def _config(checkpoint: _Checkpoint) -> dict[str, Any]:
    if "path" in checkpoint.reference:
        return read_config(Path(checkpoint.reference["path"]))
    repo, commit = checkpoint.reference["repo"], checkpoint.reference["revision"]
    return read_config(hub.download(repo, commit, filename=MODEL_CONFIG).parent)


def _stated_license(checkpoint: _Checkpoint) -> str | None:
    if "path" not in checkpoint.reference:
        return hub.license_of(**checkpoint.reference)
    card = Path(checkpoint.reference["path"]) / CARD
    stated = card_fields(read_text(card) if card.is_file() else "").get("license")
    return stated if isinstance(stated, str) else None


# --- judging ------------------------------------------------------------------------------------------------


def _common_weights(*, base: _Checkpoint, tuned: _Checkpoint, task_type: str | None) -> int:
    """Count the weight matrices that both hold, in equal shapes; the head of a classifier may have another one.

    Args:
        base: the base.
        tuned: the merged fine-tune.
        task_type: of the adapter.

    Returns:
        How many there are, at least one.

    Raises:
        ExtractionError: there is none, or a tensor has another shape in the other checkpoint.
    """
    theirs_by_name = _named_alike(base.headers, tuned.headers)
    common = sorted(tuned.headers.keys() & theirs_by_name.keys())
    heads = heads_of(task_type, {name.rpartition(".")[0] for name in common})
    common = [name for name in common if name.rpartition(".")[0] not in heads]
    shapes = {name: (tuned.headers[name][1], theirs_by_name[name][1]) for name in common}
    unlike = [f"{name} {list(ours)} and {list(theirs)}" for name, (ours, theirs) in shapes.items() if ours != theirs]
    if unlike:
        rest = f", and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
        raise ExtractionError(
            f"{len(unlike)} tensors differ in shape between {tuned.shown} and {base.shown}: "
            f"{'; '.join(unlike[:_SHOWN])}{rest}",
            expected="equal shapes, as a fine-tune and its base have",
            next_step="name the base that this source was made from",
        )
    weights = sum(len(ours) == 2 for ours, _ in shapes.values())  # noqa: PLR2004 - a matrix has two dimensions
    if not weights:
        raise ExtractionError(
            f"{tuned.shown} and {base.shown} have no weight matrix in common: "
            f"one holds {_first(tuned)}, the other {_first(base)}",
            expected="the same tensor names in both",
            next_step="name the base that this source was made from",
        )
    return weights


def _named_alike(headers: _Headers, others: _Headers) -> _Headers:
    """Return the headers by the names that the others have, where one side alone has a prefix before every name.

    Files of a model without a head have none, as GPT-2's on the Hub. Extraction asks the model class.
    """
    if headers.keys() & others.keys():
        return headers
    longer = {name.partition(".")[2]: name for name in others}
    shorter = {name.partition(".")[2]: name for name in headers}
    if longer.keys() & headers.keys():
        return {longer.get(name, name): header for name, header in headers.items()}
    return {short if short in others else name: headers[name] for short, name in shorter.items()}


def _first(checkpoint: _Checkpoint) -> str:
    return min(checkpoint.headers, default="nothing")


def _model_class(config: dict[str, Any], checkpoint: _Checkpoint) -> str:
    match config.get("architectures"):
        case [str(name), *_] if name.isidentifier():
            return name
    raise PublisherError(
        f"config.json of {checkpoint.shown} does not say which class the model has",
        expected='"architectures": ["..."], as save_pretrained writes it',
        next_step="save the model again, or add the line",
    )


def _dtype(checkpoint: _Checkpoint) -> str:
    counts = Counter(dtype for dtype, _ in checkpoint.headers.values())
    usual = next((DTYPES[dtype].torch for dtype, _ in counts.most_common() if dtype in LORA_DTYPES), None)
    if usual is None:
        raise PublisherError(
            f"{checkpoint.shown} holds tensors of {', '.join(sorted(counts))} alone",
            expected=f"{', '.join(sorted(LORA_DTYPES))}",
            next_step="name the checkpoint before it was quantised",
        )
    return usual


# --- writing ------------------------------------------------------------------------------------------------


def _license_line(checkpoint: _Checkpoint) -> str:
    stated = _stated_license(checkpoint)
    if stated and is_license(stated):
        return f"{_scalar(stated)} # as the source states it"
    return "other # edit: the source states no licence that the Hub knows"


def _reference_lines(checkpoint: _Checkpoint) -> str:
    return "\n".join(f"      {field}: {_scalar(value)}" for field, value in checkpoint.reference.items())


def _slug(name: str) -> str:
    """Return the name in the letters that a repository's name may have."""
    return "-".join(re.findall(r"[A-Za-z0-9]+(?:[._][A-Za-z0-9]+)*", name)) or "model"


def _scalar(text: str) -> str:
    """Return the text as YAML on one line, in quotes where it needs them."""
    return yaml.safe_dump(text, allow_unicode=True, width=float("inf")).removesuffix("...\n").rstrip("\n")
