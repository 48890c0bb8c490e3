"""Which sources of this package a module can run: itself, and all that it imports, directly or through others.

What was made by one of the package's modules holds as long as none of these sources has changed. They are found in
the sources themselves, so that no list of them can be out of date. An import inside a function counts; one under
`if TYPE_CHECKING:` does not, since it never happens. A package's `__init__.py` runs before any of its modules does.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def closure(*modules: str, root: Path = PACKAGE) -> tuple[str, ...]:
    """Return the sources that these modules can run, as paths inside the package, sorted.

    Args:
        modules: their names with dots, such as `publisher.pipeline.stages.extract`.
        root: the folder of the package.

    Returns:
        Paths with forward slashes.

    Raises:
        ValueError: one of the modules is not in the package.
    """
    found, waiting = dict[str, str](), list(modules)
    unknown = [name for name in modules if _source(name, root) is None]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not in {root}")
    while waiting:
        name = waiting.pop()
        source = _source(name, root)
        if name in found or source is None:
            continue
        found[name] = source.relative_to(root).as_posix()
        waiting += _imported(source.read_bytes(), _package_of(name, source))
        waiting.append(name.rpartition(".")[0])
    return tuple(sorted(found.values()))


def _source(name: str, root: Path) -> Path | None:
    """Return the file of a module of the package; None where the name is that of something else."""
    first, *rest = name.split(".")
    if first != root.name:
        return None
    place = root.joinpath(*rest)
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _package_of(name: str, source: Path) -> str:
    return name if source.name == "__init__.py" else name.rpartition(".")[0]


@cache
def _imported(source: bytes, package: str) -> tuple[str, ...]:
    """Return the names that a source imports; some are of functions or classes, and have no file."""
    return tuple(dict.fromkeys(_names(ast.parse(source), package)))


def _names(node: ast.AST, package: str) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            for other in node.orelse:
                yield from _names(other, package)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _names(child, package)
