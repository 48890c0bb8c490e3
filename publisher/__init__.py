"""publisher: takes the LoRA adapter back out of a merged fine-tune, proves it equal, and publishes it."""

__version__ = "0.2.0"
