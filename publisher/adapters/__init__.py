"""The adapter as files and in models: PEFT's files, strict loading, merging, the residual, exports for other loaders.

It refuses whatever PEFT would pass over with a warning or silently, a base that has no place for an adapter, and an
export that does not read back as the adapter.

Begin with `peft_files`, which writes an adapter, and `loading`, which loads one into its model. `merging` says what
each tensor of a base becomes, and `merged_checkpoint` writes it; `residual` is the file of elements that differ then.
"""
