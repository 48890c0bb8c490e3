"""The list of a manifest's fields, and the rules that hold between them.

`fields` says what a single field may hold; a rule between fields is checked once the fields themselves are sound.
"""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, PositiveInt, field_validator, model_validator

from publisher.manifest import architectures
from publisher.manifest.fields import (
    PIN,
    Carry,
    ClassName,
    CommitId,
    Divergence,
    Energy,
    Issuer,
    Label,
    Layers,
    License,
    LocalPath,
    ModuleFile,
    PublicKey,
    Rank,
    RepoId,
    RequestPath,
    Section,
    Share,
    Summary,
    TaskType,
    Text,
    Title,
    VariantPath,
)


class Reference(Section):
    """A checkpoint: a Hub repository at a full commit id, or a local folder."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["repo", "revision"]}, {"required": ["path"]}]})

    repo: RepoId | None = None
    """Repository on the Hub, as owner/name."""
    revision: CommitId | None = None
    """Full commit id of 40 digits; `publish pin` writes it."""
    path: LocalPath | None = None
    """Local checkpoint folder, relative to the folder publish runs in; instead of repo and revision."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.path is not None and (self.repo or self.revision):
            raise ValueError("has both path and repo or revision; give repo and revision, or path alone")
        if self.path is None and self.repo is None:
            raise ValueError("names no checkpoint; give repo and revision, or path")
        if self.repo is not None and self.revision is None:
            raise ValueError(f"has a repo without a revision; pin it: {PIN}")
        return self

    @property
    def where(self) -> str:
        """The reference as one string: what `from_pretrained` takes."""
        return self.path or self.repo or ""


class AdapterSettings(Section):
    """How the adapter is made. Nothing has a hidden default but `ignore` and `carry`, which are empty."""

    method: Literal["svd", "exact"]
    """How the update is factored: svd, the best fit of its rank; exact, so that merging gives the released weights."""
    rank: Rank
    """Rank of the adapter; auto: what stands above the merge's rounding; or {energy: 0.95}, for a full fine-tune."""
    dtype: Literal["bfloat16", "float32", "float16"]
    """Type in which the factors are stored."""
    layout: Literal["pattern", "uniform"]
    """pattern: narrower modules keep their own rank; uniform: all are padded with zeros to one rank."""
    task_type: TaskType = None
    """PEFT's task type, by which it wraps the class; left out where no wrapper fits, as for Whisper, ViT or CLIP."""
    ignore: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Tensors (names, or patterns with *) that may differ and are left out; extraction.json and the card say so."""
    carry: Carry = ()
    """Tensors (likewise) that no LoRA can hold and are stored whole, with their module; auto: all that there are."""
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


class Expectation(Section):
    """What the checkpoint must show; the run fails where it says otherwise."""

    linears: PositiveInt | None = None
    """How many linear modules the adapter has."""
    layers: Layers | None = None
    """The layers that carry it, such as 40-63 or 0-3, 7."""


class Dataset(Section):
    """A dataset repository on the Hub at a full commit id."""

    repo: RepoId
    """Dataset repository, as owner/name."""
    revision: CommitId
    """Full commit id of 40 digits; `publish pin` writes it."""


class Bounds(Section):
    """What a comparison must keep to; the run fails where it does not. Without a bound the figure is only stated."""

    max_answers_changed: Share | None = None
    """The largest share of answers that may change, such as 0.005."""
    max_kl: Divergence | None = None
    """The largest Kullback-Leibler divergence of one question, in nats, such as 0.01."""


class RequestSet(Bounds):
    """One test set: a file of requests that both models answer."""

    name: Label
    """What readers of the card call this set: one line of plain text, 100 characters at most."""
    file: RequestPath
    """JSON lines, gzip or not; relative to the folder in which you run publish, or to the dataset's root."""
    dataset: Dataset | None = None
    """Where the file is on the Hub; without it the file is local."""
    limit: PositiveInt | None = None
    """Take only so many requests from the file's beginning."""


class VerificationSettings(Section):
    """How base + adapter is held against the released model."""

    runner: Literal["decision", "logits"]
    """decision: the source's own decision module; logits: the next token after each text, for any language model."""
    module: ModuleFile = "joint_schema_model.py"
    """The source repository's file with the decision functions; for the decision runner."""
    trust_remote_code: bool = False
    """The decision runner runs code of the source repository, at its pin: true allows that."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """In what the models run, usually what the release is stored in."""
    batch: PositiveInt = 8
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


class Variant(Section):
    """One adapter: where it goes in the repository, what it comes from, how it is made."""

    path: VariantPath
    """Place in the repository: / for the root, or a subfolder such as flash/."""
    label: Label
    """What readers of the card call this variant: one line of plain text, 100 characters at most."""
    source: Reference
    """The merged fine-tune."""
    base: Reference
    """The model it was made from."""
    model_class: ClassName
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

    @model_validator(mode="after")
    def _runner_fits_class(self) -> Self:
        asked = self.verification is not None and self.verification.runner == "logits"
        if asked and (not architectures.gives_next_token(self.model_class) or self.adapter.task_type == "SEQ_2_SEQ_LM"):
            raise ValueError(
                f"verification.runner logits asks for the token after a text, and {self.model_class} is no such "
                "language model; remove verification: validation compares the outputs of any class"
            )
        return self

    @property
    def folder(self) -> str:
        """The subfolder in the repository without a trailing slash; empty for the root."""
        return "" if self.path == "/" else self.path.removesuffix("/")


class CardSettings(Section):
    """What the card says that no artefact can know."""

    template: Text
    """Template of the card: one that comes with the tool, or a file beside the manifest."""
    title: Title
    """The card's heading: one line of plain text, 200 characters at most."""
    summary: Summary
    """One sentence under the heading, in one line of plain text, 1,000 characters at most."""
    usage: Text = "usage_peft.md.j2"
    """Template of the part that shows how the adapter is loaded."""


class SigstoreSigner(Section):
    """Who signs through Sigstore: both are told by the certificate that Sigstore gives the signer."""

    identity: Text
    """The signer, such as https://github.com/OWNER/NAME/.github/workflows/release.yml@refs/tags/v1.2.0."""
    issuer: Issuer
    """Who vouches for that identity, such as https://token.actions.githubusercontent.com."""


class Signer(Section):
    """Who must have signed the release: the holder of a key, or an identity that Sigstore knows."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["key"]}, {"required": ["sigstore"]}]})

    key: PublicKey | None = None
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


class Manifest(Section):
    """The whole manifest, version 1."""

    version: Literal[1]
    """Version of the manifest's format: 1."""
    repo: RepoId
    """Repository that is published, as owner/name."""
    license: License
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
