"""What `publish merge` wrote."""

from publisher.records.record import Count, Each, Record


class Merged(Record):
    """The checkpoint that was written; the document that `--json` prints.

    Attributes:
        folder: where it is.
        shards: files of weights.
        size: bytes of them.
        linears: weights with the adapter in them.
        carried: modules replaced whole.
        released: all adapted weights are the released ones in every bit, as extraction.json has it.
        share: of the adapted weights' elements that are, likewise; none where they are in FP8 or float32.
        left_out: tensors in which the release differs from the base and this checkpoint does not.
    """

    folder: str
    shards: Count
    size: Count
    linears: Count
    carried: Count
    released: bool
    share: float | None
    left_out: Each[str]
