"""Checkpoints on disk and streamed from the Hub: headers, tensors one at a time, FP8, and writing.

It refuses pickled weights, files that are not whole, and headers beyond the limits of the border.

Begin with `snapshots`, which gives the headers and a reader of any checkpoint, and `pairs`, which opens base and tuned
beside each other. Below them, `files` says what a checkpoint is made of; `headers` and `reading` are for folders,
`remote_headers` and `streaming` for the Hub; `fp8_reader` shows FP8 weights as bfloat16, by the arithmetic of `fp8`.
`writing` writes a file of tensors, `rewriting` a file with some of its tensors replaced.
"""
