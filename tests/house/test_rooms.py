"""`ls publisher/` is the architecture: a short list of rooms, which CONTRIBUTING.md names one by one."""

import re
from pathlib import Path

import publisher
from tests.conftest import LONGEST

PACKAGE = Path(publisher.__file__).parent
ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MOST = 18


def listed() -> set[str]:
    """What a reader sees of the package: folders, and modules that are not Python's own."""
    shown = (path for path in PACKAGE.iterdir() if not path.name.startswith(("_", ".")) and path.name != "py.typed")
    return {f"{path.name}/" if path.is_dir() else path.name for path in shown}


def test_the_files_whose_tests_begin_first_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []


def test_the_map_in_contributing_is_the_list_of_rooms() -> None:
    part = CONTRIBUTING.partition("## Where things are\n")[2].partition("\n## ")[0]
    named = re.findall(r"^ {4}(\w+(?:/|\.py)) +\S", part, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == listed()


def test_a_reader_sees_few_rooms_at_once() -> None:
    assert len(listed()) <= MOST


def test_every_room_says_in_its_first_lines_what_it_is_for() -> None:
    silent = [
        room
        for room in sorted(listed())
        if room.endswith("/") and not re.match(r'"""[A-Z`].{40,}', (PACKAGE / room / "__init__.py").read_text("utf-8"))
    ]
    assert silent == []
