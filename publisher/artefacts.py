"""The names of the files that are published: the staged tree holds these and nothing else."""

CARD = "README.md"
MANIFEST = "manifest.yaml"
CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
EXTRACTION = "extraction.json"
RESIDUAL = "residual.safetensors"
VERIFICATION = "verification.json"
SIGNATURE = "model.sig"

PER_REPOSITORY = (CARD, MANIFEST)
OPTIONAL_PER_REPOSITORY = (SIGNATURE,)
PER_VARIANT = (CONFIG, ADAPTER, EXTRACTION)
OPTIONAL_PER_VARIANT = (RESIDUAL, VERIFICATION)
ALL = frozenset((*PER_REPOSITORY, *OPTIONAL_PER_REPOSITORY, *PER_VARIANT, *OPTIONAL_PER_VARIANT))
