"""Which files beside the weights go along with a model: tokenizer, processor, code, licence, and whole modules.

A sentence-transformers repository names in modules.json the folders of further modules, which go along with all that
they hold. Elsewhere weights do not: those in other formats are the base's. A folder that holds such weights stays
behind as a whole. Hidden files stay behind too, and links to folders are not followed.
"""

from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from publisher.border.files import read_regular
from publisher.border.json_text import parse_json
from publisher.border.limits import LIMITS
from publisher.border.paths import repository_path
from publisher.errors import FetchError

MODULES = "modules.json"
_WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".ckpt", ".ot"})


def going_along(paths: Iterable[str], modules: Collection[str]) -> list[str]:
    """Return the paths of the files that go along, sorted.

    Args:
        paths: of all files of the model's folder, relative to it, with `/`.
        modules: folders that go along with all that they hold, as from `module_folders`.

    Returns:
        Those that are no weights of the model itself, in whatever format.
    """
    every = sorted(path for path in paths if not any(part.startswith(".") for part in PurePosixPath(path).parts))
    whole = [path for path in every if any(path.startswith(f"{folder}/") for folder in modules)]
    others = [path for path in every if path not in set(whole)]
    foreign = {str(PurePosixPath(path).parent) for path in others if _is_weights(path)} - {"."}
    kept = [path for path in others if not _is_weights(path) and not _is_within(path, foreign)]
    return sorted([*whole, *kept])


def module_folders(modules_json: Path) -> frozenset[str]:
    """Return the folders that a modules.json of sentence-transformers names; none where there is no such file.

    Raises:
        FetchError: it is not such a file.
    """
    if not modules_json.is_file():
        return frozenset()
    try:
        entries = parse_json(read_regular(modules_json, limit=LIMITS.json_bytes))
        paths = [entry.get("path") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        return frozenset(repository_path(path) for path in paths if isinstance(path, str) and path)
    except (OSError, ValueError) as error:
        raise FetchError(
            f"{modules_json} does not name the folders of further modules: {error}",
            expected="a list of modules as sentence-transformers writes it",
            next_step="download the repository again",
        ) from None


def _is_weights(path: str) -> bool:
    return PurePosixPath(path).suffix in _WEIGHTS


def _is_within(path: str, folders: Collection[str]) -> bool:
    return any(str(parent) in folders for parent in PurePosixPath(path).parents)
