"""What the name of a tensor says of its module."""


def module_of(name: str) -> str:
    """Return the module that this tensor is a parameter of."""
    return name.rpartition(".")[0]
