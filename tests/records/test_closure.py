"""What a result rests on is the code that can make it: no less, and not everything."""

import shutil
from pathlib import Path

import pytest

from publisher.records.closure import PACKAGE, closure
from publisher.records.provenance import code_digest, code_digest_in

STAGES = (
    "pipeline.stages.extract",
    "pipeline.stages.validate",
    "pipeline.stages.verify",
    "loaders",
    "verification.answer_job",
)
OUTSIDE = {
    "cli/app.py",
    "cli/console.py",
    "pipeline/run.py",
    "release/card.py",
    "pipeline/stages/push.py",
    "audits/__init__.py",
    "release/report.py",
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's sources, to be changed."""
    folder = tmp_path / "publisher"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.long
def test_one_changed_line_in_any_module_that_a_stage_imports_changes_its_code_and_no_other_does(
    copy: Path, stage: str
) -> None:
    inside = set(closure(f"publisher.{stage}", root=copy))
    every = {file.relative_to(copy).as_posix() for file in copy.rglob("*.py")}
    assert every > OUTSIDE
    assert not inside & OUTSIDE
    before = code_digest_in(copy, f"publisher.{stage}")
    for name in sorted(every - inside):
        add_line(copy / name)
    assert code_digest_in(copy, f"publisher.{stage}") == before
    for name in sorted(inside):
        text = (copy / name).read_text(encoding="utf-8")
        add_line(copy / name)
        assert code_digest_in(copy, f"publisher.{stage}") != before, name
        (copy / name).write_text(text, encoding="utf-8")


def add_line(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8") + "\n# another line\n", encoding="utf-8")


def test_a_stage_rests_on_what_its_imports_import_and_on_the_packages_they_lie_in() -> None:
    found = closure("publisher.pipeline.stages.extract")
    assert code_digest("publisher.pipeline.stages.extract") == code_digest_in(
        PACKAGE, "publisher.pipeline.stages.extract"
    )
    assert {
        "pipeline/stages/extract.py",
        "pipeline/stages/__init__.py",
        "__init__.py",
        "numerics/svd.py",
        "adapters/exports/mlx.py",
    } < set(found)


def written(folder: Path, sources: dict[str, str]) -> Path:
    root = folder / "publisher"
    for name, text in {"__init__.py": "", **sources}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_an_import_inside_a_function_counts_and_one_for_the_type_checker_alone_does_not(tmp_path: Path) -> None:
    sources = {
        "stage.py": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from publisher import never\nelse:\n    from publisher import otherwise\n"
        "def work():\n    if True:\n        from publisher.late import x\n",
        "never.py": "",
        "otherwise.py": "",
        "late.py": "x = 1\nimport json, publisher.deep.inner\n",
        "deep/__init__.py": "from .sister import y\n",
        "deep/inner.py": "from ..far import z\nfrom . import sister\n",
        "deep/sister.py": "y = 1\n",
        "far.py": "z = 1\n",
        "unused.py": "import publisher.stage\n",
    }
    root = written(tmp_path, sources)
    expected = set(sources) - {"never.py", "unused.py"} | {"__init__.py"}
    assert set(closure("publisher.stage", root=root)) == expected


def test_modules_that_import_each_other_come_to_an_end(tmp_path: Path) -> None:
    root = written(tmp_path, {"a.py": "import publisher.b\n", "b.py": "from publisher.a import x\n"})
    assert closure("publisher.a", root=root) == ("__init__.py", "a.py", "b.py")


def test_a_module_that_is_not_there_is_a_mistake_and_no_empty_closure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"publisher\.gone is not in"):
        closure("publisher.gone", root=written(tmp_path, {}))
