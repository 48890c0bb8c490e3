"""What `publish merge` wrote."""

from publisher.records.record import Count, Each, Record


class Merged(Record):
    """The checkpoint that was written; the document that `--json` prints.

    Attributes:
        folder: the folder that holds the checkpoint.
        shards: how many files of weights there are.
        size: bytes of these files.
        linears: weights with the adapter in them.
        experts: parameters of experts with the adapter in them.
        carried: modules replaced whole.
        released: all adapted weights are the released ones in every bit, as extraction.json has it.
        share: share of the adapted weights' elements that are the released ones in every bit; None where they are in
            FP8 or float32.
        left_out: tensors in which the release differs from the base and this checkpoint does not.
    """

    folder: str
    shards: Count
    size: Count
    linears: Count
    experts: Count = 0
    carried: Count
    released: bool
    share: float | None
    left_out: Each[str]
