"""What was seen when PEFT loaded the adapter on the base."""

from typing import Literal

from publisher.records.record import Count, Figure, Record


class FunctionCheck(Record):
    """Logits of base + adapter against source and base on fixed inputs.

    Attributes:
        dtype: dtype of the forward passes.
        inputs: shape of each input, by the name of the class's argument.
        outputs: names of what is compared, whole: `logits`, or what the class has in their place.
        distance: |logits(base + adapter) - logits(source)|, Frobenius.
        base_distance: |logits(base) - logits(source)|, Frobenius.
        ratio: distance / base_distance; 0 is perfect, 1 means the adapter changes nothing.
        largest: largest absolute difference of one logit, base + adapter against source.
    """

    dtype: str
    inputs: dict[str, tuple[int, ...]]
    outputs: tuple[str, ...]
    distance: Figure
    base_distance: Figure
    ratio: Figure
    largest: Figure


class Validation(Record):
    """What validation saw, and the versions of the packages that judged. Local: it is part of no artefact.

    Attributes:
        path: the variant's path.
        modules: how many modules PEFT loads.
        tensors: how many tensors the adapter's file has.
        largest_claim_difference: largest difference between a figure of extraction.json and the files.
        function: how far the outputs of base + adapter are from the source's; None where they were not compared.
        function_skipped: why they were not compared.
        incomparable: the same, where that is the class's doing and so on any machine; loaders.json has it too.
        packages: versions by package.
    """

    path: str
    modules: Count
    tensors: Count
    largest_claim_difference: Figure
    function: FunctionCheck | None
    function_skipped: str | None
    incomparable: str | None = None
    packages: dict[str, str]


Kind = Literal["noul", "choice", "score", "token"]
