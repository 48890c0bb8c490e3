"""The adapter as files and in models: PEFT's files, strict loading, merging, the residual, exports for other loaders.

It refuses whatever PEFT would pass over. Begin with `peft_files`.
"""
