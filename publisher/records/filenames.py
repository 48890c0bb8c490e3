"""The names of the files that are published: the staged tree holds these and nothing else."""

from pathlib import PurePosixPath

CARD = "README.md"
MANIFEST = "manifest.yaml"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
EXTRACTION = "extraction.json"
RESIDUAL = "residual.safetensors"
LOADERS = "loaders.json"
VERIFICATION = "verification.json"
SIGNATURE = "model.sig"
GGUF = "adapter_model.gguf"
MLX = "mlx"
MLX_ADAPTER = f"{MLX}/adapters.safetensors"
MLX_CONFIG = f"{MLX}/adapter_config.json"
EXPORTS = {"gguf": (GGUF,), "mlx": (MLX_ADAPTER, MLX_CONFIG)}
ERRORS_CHART = "errors.svg"
SPECTRUM_CHART = "spectrum.svg"

PER_REPOSITORY = (CARD, MANIFEST)
OPTIONAL_PER_REPOSITORY = (SIGNATURE,)
PER_VARIANT = (ADAPTER_CONFIG, ADAPTER, EXTRACTION)
CHARTS = (ERRORS_CHART, SPECTRUM_CHART)
OPTIONAL_PER_VARIANT = (
    RESIDUAL,
    LOADERS,
    VERIFICATION,
    *CHARTS,
    *(name for names in EXPORTS.values() for name in names),
)
ALL = frozenset((*PER_REPOSITORY, *OPTIONAL_PER_REPOSITORY, *PER_VARIANT, *OPTIONAL_PER_VARIANT))


def placed(path: str) -> tuple[PurePosixPath, str] | None:
    """Return the folder of the variant or repository that has a file, and the artefact that it is; None for others."""
    place = PurePosixPath(path)
    if place.parent.name == MLX:  # its adapter_config.json is not PEFT's
        name = f"{MLX}/{place.name}"
        return (place.parent.parent, name) if name in ALL else None
    return (place.parent, place.name) if place.name in ALL else None
