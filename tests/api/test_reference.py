"""docs/api.md is what the docstrings say now, and its examples give what they show."""

import doctest
import re
import shutil
from pathlib import Path

import pytest

import publisher
from tests.api import reference
from tests.conftest import Golden

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_docstrings_say(golden: Golden) -> None:
    golden(ROOT / "docs/api.md", reference.page())


def test_the_page_has_every_name() -> None:
    text = reference.page()
    functions = {"audit", "extract", "load_manifest", "run", "validate", "verify"}
    assert functions <= set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    assert [name for name in publisher.__all__ if name != "__version__" and name not in text] == []


def test_an_option_without_a_word_would_be_seen() -> None:
    for name in ("extract", "run", "audit"):
        section = reference.page().partition(f"### {name}\n")[2].partition("\n### ")[0]
        options = set(re.findall(r"^    (\w+): ", section.partition("```\n")[0], re.MULTILINE))
        assert options
        assert options <= set(re.findall(r"^- `(\w+)`: ", section, re.MULTILINE)), name


def run_example(name: str) -> None:
    """Run the example of one function, which must give what it shows."""
    section = reference.page().partition(f"### {name}\n")[2].partition("\n### ")[0]
    code = section.partition("```pycon\n")[2].partition("```")[0]
    assert ">>> " in code
    example = doctest.DocTestParser().get_doctest(code, {"publisher": publisher}, name, None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_example_of_an_extraction_gives_what_it_shows(models: Path) -> None:
    assert models.is_dir()
    run_example("extract")


@pytest.mark.parametrize("name", ["load_manifest", "run", "validate", "verify", "audit"])
def test_an_example_on_the_demo_gives_what_it_shows(own_small_run: Path, name: str) -> None:
    (own_small_run / "manifests").mkdir()
    shutil.copy("demo.yaml", "manifests")
    run_example(name)


def test_the_snippet_of_the_readme_runs(own_small_run: Path, pair: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (own_small_run / "manifests").mkdir()
    shutil.copy("demo.yaml", "manifests")
    Path("models").symlink_to(pair)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = readme.partition("## From Python\n\n```python\n")[2].partition("```")[0]
    exec(snippet, {})  # noqa: S102 - it is ours
    assert capfd.readouterr() == ("8 0.00291289\n()\n", "")
    assert Path("adapter/adapter_model.safetensors").is_file()
