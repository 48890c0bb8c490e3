"""Checkpoints on disk and streamed from the Hub: headers, tensors one at a time, FP8, and writing.

It refuses pickled weights and files that are not whole. Begin with `tensors`.
"""
