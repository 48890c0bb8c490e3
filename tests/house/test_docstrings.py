"""Docstrings are sentences that anyone reads: the rules of CONTRIBUTING.md, for every function of the package.

A docstring begins with a verb, says more than its name does, and tells of every parameter where there are several.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import publisher

PACKAGE = Path(publisher.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
SEVERAL = 3  # parameters from which each is told of
FEWEST = 4  # words in a first line
_VERBS = """
Add Answer Apply Ask Begin Build Call Cancel Change Check Choose Clear Close Collect Commit Compare Compute
Convert Copy Count Create Decide Decode Decompose Delete Describe Download Draw Encode End Enter Escape
Estimate Exit Expand Explain Extract Fetch Fill Find Fold Follow Forget Format Give Group Handle Hash Hold Iterate
Join Keep List Load Log Make Mark Measure Merge Move Name Note Open Pack Parse Pin Plan Predict Prepare Print
Publish Push Put Raise Rank Read Receive Record Refuse Release Remove Render Replace Report Request Require
Reset Resolve Return Round Run Save Send Serve Set Show Sign Skip Split Start Stop Store Stream Submit Sum
Take Tell Test Transpose Try Turn Unpack Update Upload Use Validate Verify Wait Walk Warn Work Wrap Write
Yield
"""
VERBS = frozenset(_VERBS.split())


@dataclass(frozen=True)
class Documented:
    """A function with a docstring, and where it stands."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    text: str
    is_public: bool

    @property
    def first(self) -> str:
        """The first line."""
        return self.text.split("\n")[0]

    @property
    def is_property(self) -> bool:
        """Whether it is read like a value, so that a noun phrase says what it is."""
        decorators = {getattr(one, "id", getattr(one, "attr", "")) for one in self.node.decorator_list}
        return not decorators.isdisjoint({"property", "cached_property"})

    @property
    def parameters(self) -> list[str]:
        """The names of what it is given."""
        given = self.node.args
        plain = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        rest = [one.arg for one in (given.vararg, given.kwarg) if one is not None]
        return [name for name in (*plain, *rest) if name not in {"self", "cls"}]

    @property
    def gives_nothing(self) -> bool:
        """Whether it returns None."""
        return isinstance(self.node.returns, ast.Constant) and self.node.returns.value is None


def documented(body: list[ast.stmt], *, above: str = "", is_public: bool = True) -> Iterator[Documented]:
    """Yield the functions of a module or class, and of the classes in it."""
    for node in body:
        if isinstance(node, ast.If):
            yield from documented(node.body, above=above, is_public=is_public)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name, seen = f"{above}{node.name}", is_public and not node.name.startswith("_")
        if isinstance(node, ast.ClassDef):
            yield from documented(node.body, above=f"{name}.", is_public=seen)
        elif text := ast.get_docstring(node):
            yield Documented(name, node, text, is_public=seen)


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether click shows the docstring as the command's help, and each option has a help of its own."""
    called = (one.func for one in node.decorator_list if isinstance(one, ast.Call))
    return any(isinstance(one, ast.Attribute) and one.attr in {"command", "group"} for one in called)


def complaints(source: str) -> list[str]:
    """Return what the rules say against the docstrings of a module."""
    return [
        f"{one.node.lineno}: {one.name} {what}"
        for one in documented(ast.parse(source).body)
        if not is_command(one.node)
        for what in (*of_the_first_line(one), *of_the_sections(one))
    ]


def of_the_first_line(one: Documented) -> Iterator[str]:
    words = one.first.split()
    if not one.is_property and words[0].rstrip(".,:") not in VERBS:
        yield f"begins with no verb: {one.first}"
    if len(words) < FEWEST:
        yield f"says too little: {one.first}"


def of_the_sections(one: Documented) -> Iterator[str]:
    if not one.is_public or len(one.parameters) < SEVERAL:
        return
    told = {line.strip().partition(":")[0].lstrip("*") for line in one.text.split("\n") if line.startswith("    ")}
    if "Args:" not in one.text:
        yield "has no Args"
    elif missing := [name for name in one.parameters if name not in told]:
        yield f"says nothing of {', '.join(missing)}"
    if not one.gives_nothing and "Returns:" not in one.text and "Yields:" not in one.text:
        yield "has no Returns"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_the_docstrings_of_a_module_are_sentences(file: Path) -> None:
    assert complaints(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("docstring", "complaint"),
    [
        ("By its name and by its size.", "begins with no verb"),
        ("Return it.", "says too little"),
        ("Return the one that is meant.", "has no Args"),
        ("Return the one.\n\n    Args:\n        a: one.\n        b: two.\n", "says nothing of c"),
        ("Return the one.\n\n    Args:\n        a: one.\n        b: two.\n        c: three.\n", "has no Returns"),
    ],
)
def test_a_docstring_that_breaks_a_rule_is_found(docstring: str, complaint: str) -> None:
    found = complaints(f'def public(a: int, b: int, c: int) -> int:\n    """{docstring}"""\n')
    assert any(complaint in one for one in found), found
