"""The names of the files that are published: the staged tree holds these and nothing else."""

CARD = "README.md"
MANIFEST = "manifest.yaml"
CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
EXTRACTION = "extraction.json"
RESIDUAL = "residual.safetensors"
VERIFICATION = "verification.json"
SIGNATURE = "model.sig"
ERRORS_PICTURE = "errors.svg"
SPECTRUM_PICTURE = "spectrum.svg"

PER_REPOSITORY = (CARD, MANIFEST)
OPTIONAL_PER_REPOSITORY = (SIGNATURE,)
PER_VARIANT = (CONFIG, ADAPTER, EXTRACTION)
PICTURES = (ERRORS_PICTURE, SPECTRUM_PICTURE)
OPTIONAL_PER_VARIANT = (RESIDUAL, VERIFICATION, *PICTURES)
ALL = frozenset((*PER_REPOSITORY, *OPTIONAL_PER_REPOSITORY, *PER_VARIANT, *OPTIONAL_PER_VARIANT))
