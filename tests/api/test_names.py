"""What `import publisher` gives, and what it costs."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import publisher
from tests.api.reference import homes

FILE = Path(publisher.__file__)
HEAVY = ("torch", "transformers", "peft", "numpy", "pydantic", "huggingface_hub", "click")


def imported(code: str) -> set[str]:
    """The heavy packages that a new process has imported when it has run the code."""
    command = f"{code}; import sys; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", command], cwd=FILE.parents[1], capture_output=True, check=True)
    return set(done.stdout.decode().split())


def test_importing_it_imports_nothing_heavy() -> None:
    assert imported("import publisher") == set()


def test_a_manifest_is_read_and_an_error_caught_without_torch() -> None:
    code = "import publisher; publisher.PublisherError; publisher.load_manifest('manifests/demo.yaml')"
    assert not imported(code) & {"torch", "transformers", "peft", "huggingface_hub", "click"}


def test_every_name_is_what_a_type_checker_sees_under_it() -> None:
    found = homes()
    assert {"audit", "extract", "run", "validate", "verify", "load_manifest", "ExtractedAdapter"} <= found.keys()
    for name, home in found.items():
        assert getattr(publisher, name) is getattr(import_module(home), name), name


def test_every_name_of_all_is_there_and_no_other() -> None:
    errors = {name for name in dir(publisher.errors) if name.endswith("Error")}
    assert set(publisher.__all__) == {*homes(), *errors, "__version__"}
    assert set(publisher.__all__) <= set(dir(publisher))
    assert all(hasattr(publisher, name) for name in publisher.__all__)


def test_every_error_is_a_publisher_error() -> None:
    errors = [getattr(publisher, name) for name in publisher.__all__ if name.endswith("Error")]
    assert len(errors) > 20
    assert all(issubclass(error, publisher.PublisherError) for error in errors)


def test_no_name_is_that_of_a_room_which_would_take_its_place_once_imported() -> None:
    rooms = {path.stem for path in FILE.parent.iterdir()}
    assert "audits" in rooms
    assert not rooms & set(publisher.__all__)


def test_a_misspelt_name_is_an_error_for_python_and_for_mypy() -> None:
    with pytest.raises(AttributeError, match="no attribute 'extrakt'"):
        _ = publisher.extrakt  # type: ignore[attr-defined]
