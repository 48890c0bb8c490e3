"""loaders.json, and what `publish compat` prints: what each loader makes of an adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from publisher.records.files import canonical_json
from publisher.records.record import SCHEMA_VERSION, Count, Each, Record

LoaderName = Literal["PEFT", "transformers", "vLLM", "SGLang", "llama.cpp", "MLX"]
Basis = Literal["executed", "reader executed", "read"]
FindingKind = Literal[
    "missing module",
    "missing tensor",
    "other base",
    "other format",
    "other packing",
    "rank limit",
    "refused field",
    "refused tensor",
    "silent no-op",
    "unreadable",
    "unsupported model",
    "wrong scale",
]


class LoaderFinding(Record):
    """What keeps a loader from using an adapter as it is meant.

    Attributes:
        kind: of what sort it is.
        what: the same in words.
        modules: how many modules or tensors it concerns; 0 where it is the adapter as a whole.
        silent: the loader goes on without an error, at most with a line in a log.
        remedy: what helps.
    """

    kind: FindingKind
    what: str
    modules: Count
    silent: bool
    remedy: str


class LoaderVerdict(Record):
    """Whether a loader takes an adapter.

    Attributes:
        loader: which.
        version: whose rules were followed.
        basis: `executed`: the loader was run, without weights of the base; `reader executed`: its reader of
            adapter_config.json was, and the rest was read; `read`: its source was.
        loads: `wrongly`: without an error, but not as it is meant; `not told`: nothing speaks against it, and the
            rules that were read do not cover this model.
        scale: of the modules; `none` where the loader does not come as far.
        flags: what it takes to load it there.
        findings: what speaks against it; none where it loads.
        notes: when it would be otherwise.
    """

    loader: LoaderName
    version: str
    basis: Basis
    loads: Literal["yes", "no", "wrongly", "not told"]
    scale: Literal["right", "wrong", "none", "not told"]
    flags: Each[str]
    findings: Each[LoaderFinding]
    notes: Each[str]


class Loaders(Record):
    """loaders.json: one per variant, beside the adapter that was judged.

    Attributes:
        path: the variant's path.
        adapter_sha256: digest of the weights that were judged.
        config_sha256: digest of the adapter_config.json that was judged.
        verdicts: one for each loader, in a fixed order.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    path: str
    adapter_sha256: str
    config_sha256: str
    verdicts: Each[LoaderVerdict]


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdicts on each adapter, and the loaders that must take it.

    Attributes:
        verdicts: the loaders' verdicts, by the variant's label or the folder.
        required: names of loaders that must take every adapter, besides PEFT.
    """

    verdicts: Mapping[str, Sequence[LoaderVerdict]]
    required: tuple[str, ...]

    @property
    def complaints(self) -> list[str]:
        """What must not be: a loader takes an adapter wrongly, or one that must take it does not."""
        return [
            f"{label} {'loads wrongly' if one.loads == 'wrongly' else 'does not load'} with {one.loader}"
            for label, verdicts in self.verdicts.items()
            for one in verdicts
            if one.loads == "wrongly" or (one.loads != "yes" and one.loader in {"PEFT", *self.required})
        ]

    def to_json(self) -> str:
        """Return canonical JSON: label by label, the verdicts as loaders.json has them."""
        found = {label: [one.model_dump(mode="json") for one in each] for label, each in self.verdicts.items()}
        return canonical_json(found)


@dataclass(frozen=True, slots=True)
class Repaired:
    """An adapter that was written anew, without what was wrong with it.

    Attributes:
        folder: the folder that was written.
        changes: what was changed, a line for each repair.
        left: what is wrong with it still, since nobody can tell what is meant.
        judged: the verdicts on what was written.
    """

    folder: str
    changes: tuple[str, ...]
    left: tuple[str, ...]
    judged: Judged

    @property
    def complaints(self) -> list[str]:
        """What must not be: a loader takes the repaired adapter wrongly, or one that must take it does not."""
        return self.judged.complaints

    def to_json(self) -> str:
        """Return canonical JSON: the folder, the changes, what is left, and the verdicts."""
        verdicts = [one.model_dump(mode="json") for each in self.judged.verdicts.values() for one in each]
        found = {"folder": self.folder, "changes": self.changes, "left": self.left, "verdicts": verdicts}
        return canonical_json(found)
