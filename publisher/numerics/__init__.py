"""The mathematics: tensors in, tensors out, and no files.

It refuses nothing: whoever calls it has made sure that all weights are finite. Begin with `svd`, then `noise`; the
formulas are explained in docs/numerics.md, exact recovery in docs/exact.md.
"""
