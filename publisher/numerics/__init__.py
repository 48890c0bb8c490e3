"""The mathematics: tensors in, tensors out, no files. It refuses non-finite numbers. Begin with `lora`."""
