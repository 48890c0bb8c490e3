"""docs/api.md, made from the sources of the API: signatures, docstrings, fields. Nothing is imported to read them."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import publisher

PACKAGE = Path(publisher.__file__).parent
_HEAD = """\
# The Python API

    import publisher

Everything below is a name of `publisher`; each is imported when it is first used, and `import publisher` alone takes no
time. Nothing prints. Every exception is a `PublisherError`, but for what a caller's own callback raises. The command
line is a thin layer over these functions. [examples/](../examples) has four programs that use them.

This page is made from the docstrings: `UPDATE_GOLDEN=1 python -m pytest tests/api/test_reference.py` writes it anew.
"""
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Example|Yields):$", re.MULTILINE)
_ITEM = re.compile(r"^(\S+): ", re.MULTILINE)


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD, "## Functions", *_described(ast.FunctionDef), "## Results and options", *_described(ast.ClassDef)]
    errors = ast.get_docstring(ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))) or ""
    tree = errors.split("\n\n")[1]
    return "\n\n".join([*parts, "## Errors", tree]).replace("\n\n\n", "\n\n") + "\n"


def homes() -> dict[str, str]:
    """Return the module of each name that `import publisher` gives, as a type checker sees it."""
    source = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    [block] = [node for node in source.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def _described(kind: type[ast.FunctionDef | ast.ClassDef]) -> Iterator[str]:
    for name, home in homes().items():
        source = PACKAGE.parent / f"{home.replace('.', '/')}.py"
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, kind) and node.name == name:
                yield _function(node, f"publisher.{name}") if isinstance(node, ast.FunctionDef) else _class(node)


def _function(node: ast.FunctionDef, name: str, level: int = 3) -> str:
    arguments, keywords = node.args, zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    lines = [ast.unparse(one) for one in arguments.args if one.arg != "self"]
    lines += ["*"] if arguments.kwonlyargs else []
    lines += [ast.unparse(one) + (f" = {ast.unparse(default)}" if default else "") for one, default in keywords]
    lines += [f"**{ast.unparse(arguments.kwarg)}"] if arguments.kwarg else []
    returned = ast.unparse(node.returns) if node.returns else "None"
    signature = "".join(f"\n    {line}," for line in lines) + ("\n" if lines else "")
    code = f"```python\n{name}({signature}) -> {returned}\n```"
    return "\n\n".join([f"{'#' * level} {name.removeprefix('publisher.')}", code, *_text(node)])


def _class(node: ast.ClassDef) -> str:
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    typed = "\n".join(f"    {ast.unparse(one.target)}: {ast.unparse(one.annotation)}" for one in fields)
    parts = [f"### {node.name}", *_text(node)]
    parts += [f"```python\nclass {node.name}:\n{typed}\n```"] if typed else []
    for one in node.body:
        if not isinstance(one, ast.FunctionDef) or one.name.startswith("_"):
            continue
        is_property = any(ast.unparse(decorator) == "property" for decorator in one.decorator_list)
        parts.append("\n".join([f"`{one.name}`: {_summary(one)}"]) if is_property else _function(one, one.name, 4))
    return "\n\n".join(parts)


def _summary(node: ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")


def _text(node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Yield the docstring's paragraphs, and its sections as lists and code."""
    words, *sections = _SECTION.split(ast.get_docstring(node) or "")
    yield words.strip()
    for heading, body in zip(sections[::2], sections[1::2], strict=True):
        content = textwrap.dedent(body.strip("\n")).strip()
        if heading == "Example":
            yield f"```pycon\n{content}\n```"
        elif heading == "Returns":
            yield f"**Returns** {' '.join(content.split())}"
        else:
            name = "" if heading == "Attributes" else f"**{heading}**\n\n"
            yield name + "\n".join(_items(content))


def _items(content: str) -> Iterator[str]:
    for item in re.split(r"\n(?=\S)", content):
        yield _ITEM.sub(r"- `\1`: ", " ".join(item.split()))
