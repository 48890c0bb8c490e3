"""The local Hub is a project of its own: what it imports, and that its dependencies are an extra for it alone."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import publisher

PACKAGE = Path(publisher.__file__).parent
LOCAL = PACKAGE / "hub/local"
OURS = ("publisher.hub.local", "publisher.border", "publisher.errors")
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {"pyjwt": "jwt", "pyyaml": "yaml"}  # distributions that bring a module of another name


def imported(folder: Path) -> Iterator[str]:
    """Yield the name of every module that the sources below a folder import."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""


def modules_of(requirements: list[str]) -> set[str]:
    names = {re.split(r"[><=\[ ]", text)[0].lower() for text in requirements}
    return {MODULES.get(name, name) for name in names}


def test_it_uses_the_border_and_the_errors_and_nothing_else_of_the_package() -> None:
    ours = {name for name in imported(LOCAL) if name.startswith("publisher")}
    assert ours
    assert sorted(name for name in ours if not name.startswith(OURS)) == []


def test_what_it_alone_needs_is_the_extra_and_the_rest_needs_none_of_it() -> None:
    extra = modules_of(PROJECT["optional-dependencies"]["localhub"])
    common = modules_of(PROJECT["dependencies"])
    foreign = {name.partition(".")[0] for name in imported(LOCAL)} - {"publisher"} - sys.stdlib_module_names
    assert foreign - common == extra
    others = [folder for folder in PACKAGE.iterdir() if folder.is_dir() and folder.name != "hub"]
    elsewhere = {name.partition(".")[0] for folder in others for name in imported(folder)}
    assert elsewhere & extra == set()
