"""Write publisher/loaders/vllm_models.py anew, from a wheel of vLLM: `python -m tests.make_vllm_models WHEEL`.

Nothing of the wheel is run or installed. Its sources are parsed: the model registry names a class for each
architecture, and `SupportsLoRA` among the bases of a class, however far up, means that vLLM serves it with LoRA. Where
there is a class for each kind of GPU, NVIDIA's counts. Of the architectures only those are kept that the transformers
installed here has a class for. The wheel: `pip download --no-deps vllm==VERSION`. Whoever raises the version also reads
the rules in on_vllm.py again, which names their places.
"""

import ast
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import transformers

_MODELS = "vllm.model_executor.models"
_REGISTRY = f"{_MODELS}.registry"
_INTERFACE = "SupportsLoRA"
_TEXT = '''\
"""Which architectures vLLM {version} serves with LoRA, of those that transformers has classes for.

Written by `python -m tests.make_vllm_models WHEEL` from the classes of vLLM's model registry: whether `SupportsLoRA` is
among their bases. An architecture in neither set is none that vLLM has a class of its own for.
"""

VERSION = "{version}"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


WITH_LORA = _names("""
{with_lora}
""")
WITHOUT_LORA = _names("""
{without_lora}
""")
'''


@dataclass(frozen=True, slots=True)
class _Module:
    """One module of the wheel.

    Attributes:
        classes: the classes that it defines, by name.
        imports: module and name that each imported name comes from; several where the kind of GPU decides.
    """

    classes: Mapping[str, ast.ClassDef]
    imports: Mapping[str, Sequence[tuple[str, str]]]


class Sources:
    """The Python modules of a wheel, parsed as they are needed."""

    def __init__(self, wheel: Path) -> None:
        self._archive = ZipFile(wheel)
        self._files = frozenset(self._archive.namelist())
        self._parsed = cache(self._parse)

    def architectures(self) -> dict[str, tuple[str, str]]:
        """Return module and name of the class that the registry gives each architecture."""
        tables = {
            target.id: node.value
            for node in self._tree(_REGISTRY).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        found: dict[str, tuple[str, str]] = {}
        for part in tables["_VLLM_MODELS"].values:
            table = tables[part.id] if isinstance(part, ast.Name) else ast.Dict([], [])
            for key, value in zip(table.keys, table.values, strict=True):
                if key is not None:  # `**` repeats architectures of another table
                    module, name = ast.literal_eval(value)
                    full = module if module.startswith("vllm.") else f"{_MODELS}.{module}"
                    found[ast.literal_eval(key)] = (full, name)
        return found

    def serves_with_lora(self, module: str, name: str) -> bool:
        """Return whether the interface for LoRA is a base of the class, however far up."""
        if name == _INTERFACE:
            return True
        parsed = self._parsed(module)
        if name in parsed.classes:
            bases = [base.id for base in parsed.classes[name].bases if isinstance(base, ast.Name)]
            return any(self.serves_with_lora(module, base) for base in bases if base != name)
        places = parsed.imports.get(name, ())
        for_nvidia = [place for place in places if ".nvidia" in place[0]]
        return any(self.serves_with_lora(*place) for place in for_nvidia or places)

    def _parse(self, module: str) -> _Module:
        if self._file(module) is None:
            return _Module({}, {})
        nodes = list(ast.walk(self._tree(module)))
        classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        imports: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    imports[alias.asname or alias.name].append((self._absolute(module, node), alias.name))
        return _Module(classes, imports)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the full name of the module that an import names."""
        if not node.level:
            return node.module or ""
        is_package = (self._file(module) or "").endswith("/__init__.py")
        parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
        return ".".join([*parents, *filter(None, [node.module])])

    def _tree(self, module: str) -> ast.Module:
        file = self._file(module)
        if file is None:
            sys.exit(f"the wheel has no module {module}: the registry of this vLLM lies elsewhere")
        return ast.parse(self._archive.read(file))

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in self._files), None)


def module_text(wheel: Path, known: Iterable[str]) -> str:
    """Return the text of vllm_models.py; `known` are the architectures that transformers has classes for."""
    sources, wanted = Sources(wheel), frozenset(known)
    served = {
        name: sources.serves_with_lora(*place) for name, place in sources.architectures().items() if name in wanted
    }
    version = re.match(r"vllm-([^-]+)-", wheel.name)
    if version is None:
        sys.exit(f"{wheel.name} is not the name of a wheel of vLLM")
    return _TEXT.format(
        version=version[1],
        with_lora=_wrapped(name for name, with_lora in served.items() if with_lora),
        without_lora=_wrapped(name for name, with_lora in served.items() if not with_lora),
    )


def _wrapped(names: Iterable[str]) -> str:
    lines = textwrap.wrap(" ".join(sorted(names)), 104, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), "    ")


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "publisher/loaders/vllm_models.py"
    target.write_text(module_text(Path(sys.argv[1]), dir(transformers)), encoding="utf-8")
