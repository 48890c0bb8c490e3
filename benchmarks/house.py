"""Print figures of the house: boxes, arrows, functions, and how far one value walks.

    python -m benchmarks.house [CHECKOUT]

Boxes are modules, arrows are imports between them, also those inside functions. A chain link is a private function
that is called in one place only. The walk follows one parameter from call to call, in the order of the source: a stay
is a run of steps in one file, a climb a step into a file of a higher layer. All of it is read from the source with
`ast`; nothing is imported, so any checkout can be measured.
"""

import ast
import itertools
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "publisher"
START = ("extract", "variant")  # the function and its parameter, that the walk begins with
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One file: its dotted name, its tree, and what the names in it are imported from."""

    name: str
    tree: ast.Module
    functions: dict[str, Function]
    classes: dict[str, ast.ClassDef]
    imports: dict[str, str]


def main(checkout: Path) -> None:
    """Print the figures of a checkout of this project."""
    modules = read_modules(checkout)
    arrows = {(name, target) for name, module in modules.items() for target in _imported(module, modules)}
    rooms = {(a, b) for a, b in ((_room(a), _room(b)) for a, b in arrows) if a != b}
    lengths = sorted(_length(node) for module in modules.values() for node in _functions(module.tree))
    print(f"boxes {len(modules)}, arrows {len(arrows)}; rooms {len(set(map(_room, modules)))}, arrows {len(rooms)}")
    print(
        f"functions {len(lengths)}: median {statistics.median(lengths):.0f} lines, "
        f"90th percentile {lengths[len(lengths) * 9 // 10]}, longest {lengths[-1]}"
    )
    print(f"private functions with one caller {len(chain_links(modules))}")
    for name in sorted(name for name, module in modules.items() if START[0] in module.functions):
        if ".stages." in name:
            _print_walk(walk(modules, name), _layers(checkout))


def read_modules(checkout: Path) -> dict[str, Module]:
    """Return every module of the package by its dotted name."""
    modules = {}
    for file in sorted((checkout / PACKAGE).rglob("*.py")):
        name = ".".join(file.relative_to(checkout).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, Function)}
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        modules[name] = Module(name, tree, functions, classes, _names(tree))
    return modules


def chain_links(modules: dict[str, Module]) -> list[str]:
    """Return the private functions whose name is used in exactly one place of their module."""
    found = []
    for module in modules.values():
        used = Counter(node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name))
        used.update(node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute))
        private = (node.name for node in _functions(module.tree) if node.name.startswith("_"))
        found += [f"{module.name}.{name}" for name in private if used[name] == 1 and not name.startswith("__")]
    return found


def walk(modules: dict[str, Module], start: str) -> list[str]:
    """Return the modules that a value visits, one entry for each step, from the function that the walk begins with.

    A value that a class is built from visits every method of that class.
    """
    steps: list[str] = []
    done: set[tuple[str, int, str]] = set()

    def follow(module: Module, body: Function, value: str) -> None:
        key = (module.name, body.lineno, value)
        if key in done:
            return
        done.add(key)
        steps.append(module.name)
        names = {value, *_aliases(body, value)}
        for call in _calls(body):
            for home, function, received in _receivers(call, module, modules=modules, names=names):
                follow(home, function, received)
                steps.append(module.name)

    follow(modules[start], modules[start].functions[START[0]], START[1])
    return steps


def _print_walk(steps: list[str], layers: list[str]) -> None:
    stays = [step for index, step in enumerate(steps) if index == 0 or steps[index - 1] != step]
    moves = list(itertools.pairwise(stays))
    climbs = sum(_height(b, layers) > _height(a, layers) for a, b in moves)
    print(f"`{START[1]}` from {START[0]}: files {len(set(steps))}, stays {len(stays)}, climbs {climbs}")


def _height(name: str, layers: list[str]) -> int:
    fitting = [index for index, layer in enumerate(layers) if name == layer or name.startswith(f"{layer}.")]
    return -min(fitting, default=len(layers))


def _layers(checkout: Path) -> list[str]:
    """Return the modules of import-linter's layers, from the top down."""
    settings = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [f"{PACKAGE}.{name.strip(' ()').removeprefix(f'{PACKAGE}.')}" for layer in layers for name in _split(layer)]


def _split(layer: str) -> list[str]:
    return layer.replace(":", "|").split("|")


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _names(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name means: the dotted name of a module, or of something in one."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _imported(module: Module, modules: dict[str, Module]) -> set[str]:
    targets = {name if name in modules else name.rpartition(".")[0] for name in module.imports.values()}
    return (targets & modules.keys()) - {module.name}


def _calls(function: Function) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0))


def _receivers(
    call: ast.Call, module: Module, *, modules: dict[str, Module], names: set[str]
) -> Iterator[tuple[Module, Function, str]]:
    """Yield what a call hands the value to: module, function, and the value's name in there."""
    for home, name in _called(call, module):
        found = modules.get(home)
        if found is None:
            continue
        if name in found.functions:
            function = found.functions[name]
            parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
            for received in _received(call, names, parameters):
                yield found, function, received
        if name in found.classes:
            fields = _fields(found, name, modules)
            for received in _received(call, names, fields):
                methods = (node for node in found.classes[name].body if isinstance(node, Function))
                yield from ((found, method, f"self.{received}") for method in methods)


def _fields(module: Module, name: str, modules: dict[str, Module]) -> list[str]:
    """Return the fields of a dataclass in their order, those of its base classes first."""
    inherited: list[str] = []
    for base in module.classes[name].bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        home, _, parent = module.imports.get(ast.unparse(plain), f"{module.name}.{ast.unparse(plain)}").rpartition(".")
        if home in modules and parent in modules[home].classes:
            inherited += _fields(modules[home], parent, modules)
    own = [node.target for node in module.classes[name].body if isinstance(node, ast.AnnAssign)]
    return inherited + [target.id for target in own if isinstance(target, ast.Name)]


def _called(call: ast.Call, module: Module) -> Iterator[tuple[str, str]]:
    """Yield module and name of what is called; `partial(f, x)` calls f with x."""
    callee = call.func
    if isinstance(callee, ast.Name) and callee.id == "partial" and call.args:
        callee = call.args[0]
    if isinstance(callee, ast.Name):
        home, _, name = module.imports.get(callee.id, f"{module.name}.{callee.id}").rpartition(".")
        yield home, name
    elif isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name):
        yield module.imports.get(callee.value.id, ""), callee.attr


def _received(call: ast.Call, names: set[str], parameters: list[str]) -> list[str]:
    """Return the parameters that get the value itself or an attribute of it."""
    partial = isinstance(call.func, ast.Name) and call.func.id == "partial"
    given = call.args[1:] if partial else call.args
    received = [name for name, argument in zip(parameters, given, strict=False) if _is(argument, names)]
    return received + [keyword.arg for keyword in call.keywords if keyword.arg and _is(keyword.value, names)]


def _aliases(body: Function, value: str) -> set[str]:
    """Return the local names that the value, or an attribute of it, is assigned to."""
    assigned = [node for node in ast.walk(body) if isinstance(node, ast.Assign) and _is(node.value, {value})]
    return {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def _is(node: ast.expr, names: set[str]) -> bool:
    while isinstance(node, ast.Attribute) and ast.unparse(node) not in names:
        node = node.value
    return ast.unparse(node) in names


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
