"""The run: which stages run, in which order, which earlier results still hold, and the lock on the output.

It refuses a second run on the same output. Begin with `run`; `stages/` has one module for each stage.
"""
