"""Validate: the written adapter is re-read and has to do what extraction.json says.

Structure first: the files are those of extraction.json, PEFT loads them on the manifest's model class (without
weights, on the meta device), every tensor of the file reaches a parameter and every parameter has a tensor, and every
scaling is 1 (`adapters/structure_checks.py`). Then numbers: base + BA against the merged fine-tune, module by module,
from the files (`extraction/claims.py`). Then function, where the model fits in memory: the logits of base + adapter lie
close to the fine-tune's and away from the base's (`adapters/function_check.py`).
"""

from pathlib import Path

from publisher.adapters.function_check import function_obstacle, require_function
from publisher.adapters.loading import quiet
from publisher.adapters.peft_files import carried_keys
from publisher.adapters.structure_checks import judging_packages, require_no_problems, require_structure
from publisher.checkpoints.snapshots import headers_of
from publisher.engines import Engine
from publisher.extraction.claims import require_claims
from publisher.extraction.model_structure import structure_of
from publisher.extraction.summary import summary_problems
from publisher.manifest.schema import Variant
from publisher.records.checkpoint import Snapshot
from publisher.records.extraction import Extraction
from publisher.records.progress import Progress
from publisher.records.validation import FunctionCheck, Validation

_STREAMED = "the weights are streamed, and the model is not on this machine"


def validate(
    variant: Variant,
    extraction: Extraction,
    *,
    base: Snapshot,
    tuned: Snapshot,
    staged: Path,
    engine: Engine,
    progress: Progress,
) -> Validation:
    """Check the adapter in `staged` in all three ways.

    Args:
        variant: the manifest's entry.
        extraction: what its extraction.json claims.
        base: the base.
        tuned: the merged fine-tune.
        staged: the folder of the adapter.
        engine: where the arithmetic is done.
        progress: told of each way and each module.

    Returns:
        What was seen, and the versions of the packages that judged.

    Raises:
        ValidationError: the first of the three that fails, naming every module concerned.
    """
    base = extraction.as_merged(base)
    with quiet():
        progress(f"validating {variant.label}: structure")
        require_structure(variant, extraction, base=base, staged=staged)
        difference = require_claims(
            extraction,
            base=base,
            tuned=tuned,
            names=structure_of(variant.model_class, base.folder, head_of=tuned.folder).names.applied,
            staged=staged,
            engine=engine,
            progress=progress,
        )
        obstacle = _STREAMED if tuned.streamed or base.streamed else function_obstacle(headers_of(tuned))
        progress(f"validating {variant.label}: function")
        function = obstacle or require_function(variant, extraction, base=base, tuned=tuned, staged=staged)
    problems = summary_problems(extraction)
    require_no_problems(problems, "the summary in extraction.json does not follow from its modules")
    return Validation(
        path=variant.path,
        modules=len(extraction.modules) + len(extraction.experts),
        tensors=2 * (len(extraction.modules) + len(extraction.experts)) + len(carried_keys(extraction.summary.carried)),
        largest_claim_difference=difference,
        function=function if isinstance(function, FunctionCheck) else None,
        function_skipped=function if isinstance(function, str) else None,
        incomparable=function if isinstance(function, str) and not obstacle else None,
        packages=judging_packages(),
    )
