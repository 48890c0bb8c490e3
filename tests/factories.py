"""Records with figures made up for tests: they claim nothing about any model."""

from collections.abc import Sequence
from typing import Any

from publisher.extraction.comparison import Comparison
from publisher.extraction.summary import summarise
from publisher.records.checkpoint import Checkpoint, FileDigest
from publisher.records.extraction import Extraction, ModuleExtraction, Settings, Tools, spectrum_places
from publisher.records.verification import Fp8Verification, KindAgreement, Verification, VerificationSet

_FILE = FileDigest(name="adapter_model.safetensors", size=1, sha256="0" * 64)
_CHECKPOINT = Checkpoint(kind="local", name="one", revision="0" * 40, files=())


def module(name: str, *, rank: int = 4, spectra: bool = True, **figures: Any) -> ModuleExtraction:
    """Build the figures of a module of 8 x 10 weights, with any of them in another's place."""
    top, last = figures.get("sigma_1") or 2.0, figures.get("sigma_r") or 0.5
    places = spectrum_places(rank)
    values = tuple(top + (last - top) * place / max(len(places) - 1, 1) for place in range(len(places)))
    known = {"sigma_1": values[0], "sigma_r": values[-1], "sigma_next": 0.05, "noise_edge": 0.1, "update_rms": 0.01}
    known |= {"fit_error": 0.02, "relative_error": 0.02, "rounding_floor": 0.02, "expected_error": 0.02, "ratio": 1.0}
    known |= {"exact_share": 0.8, "unchanged_share": 0.01}
    return ModuleExtraction.model_validate(
        {
            "name": name,
            "shape": (8, 10),
            "rank": rank,
            "alpha": rank,
            "method": "exact svd",
            "rank_at_least": False,
            "spectrum": values if spectra else (),
            **known,
            **figures,
        }
    )


def extraction(modules: Sequence[ModuleExtraction]) -> Extraction:
    """Build the evidence of one adapter with these modules."""
    seen = Comparison((), 0, (), left_out=(), layers=(0, 1), layers_total=2)
    settings = Settings(
        method="svd", rank=4, dtype="bfloat16", layout="pattern", task_type="CAUSAL_LM", model_class="M", ignore=()
    )
    return Extraction(
        path="/",
        label="One",
        source=_CHECKPOINT,
        base=_CHECKPOINT,
        settings=settings,
        tools=Tools(publisher="0", commit=None, dirty=None, code="", device="cpu", packages={}),
        summary=summarise(modules, seen, adapter=_FILE, config=_FILE),
        modules=tuple(modules),
    )


def agreement(kind: str, *, mean: float, most: float) -> KindAgreement:
    """Build the figures of 1,200 questions of one kind, of which three change their answer."""
    return KindAgreement.model_validate(
        {
            "kind": kind,
            "questions": 1200,
            "answers_changed": 3,
            "answers_changed_share": 0.0025,
            "ties": 0,
            "max_kl": most,
            "mean_kl": mean,
            "p99_kl": (mean + most) / 2,
            "max_probability_difference": 0.01,
        }
    )


def a_set(name: str, *kinds: KindAgreement) -> VerificationSet:
    """Build the figures of a test set, whose totals are those of the first kind."""
    shared = kinds[0].model_dump(exclude={"kind"})
    return VerificationSet(name=name, requests=1, failed=0, failures=(), kinds=kinds, gold=None, **shared)


def verification(*sets: VerificationSet, fp8: bool = False) -> Verification:
    """Build a verification of these test sets, on the FP8 base too where that is asked for."""
    """Build a verification of these test sets, on the FP8 base too where that is asked for."""
    """Build the figures of a test set, whose totals are those of the first kind."""
    """Build the figures of 1,200 questions of one kind, of which three change their answer."""
    """Build the evidence of one adapter with these modules."""
    """Build the figures of a module of 8 x 10 weights, with any of them in another's place."""
    on_fp8 = Fp8Verification(base=_CHECKPOINT, against="base", linears=1, sets=sets) if fp8 else None
    return Verification(
        path="/",
        adapter_sha256="0" * 64,
        runner="logits",
        device="cpu",
        dtype="bfloat16",
        packages={},
        sets=sets,
        fp8=on_fp8,
    )
