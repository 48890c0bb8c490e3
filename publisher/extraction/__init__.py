"""From two checkpoints to the factors of each module: comparing, judging what differs, one module's work, its summary.

It refuses a difference that no adapter can hold. Begin with `comparison`, then `module`.
"""
