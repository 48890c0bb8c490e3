"""The table of stages: it is consistent with itself, with the modules, and with the page that lists it."""

import re
from importlib.util import find_spec
from pathlib import Path

from publisher.pipeline.options import Run
from publisher.pipeline.table import NAMES, OF_RELEASE, OF_VARIANT, STAGES, stage_named
from publisher.records import filenames

PAGE = Path(__file__).parents[2] / "docs/running.md"
ROW = re.compile(r"^\| `(\w+)` \|(.*)\|(.*)\|$", re.MULTILINE)


def test_every_stage_has_a_module_and_every_module_of_a_stage_is_in_the_table() -> None:
    spec = find_spec("publisher.pipeline.stages")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    modules = {path.stem for path in Path(folder).glob("*.py")} - {"__init__"}
    assert modules == set(NAMES)
    assert len(NAMES) == len(modules), "no name stands there twice"


def test_a_stage_needs_only_what_comes_before_it() -> None:
    for place, stage in enumerate(STAGES):
        assert set(stage.needs) <= set(NAMES[:place]), stage.name


def test_what_a_stage_publishes_is_a_file_of_a_release_and_no_two_stages_write_one_file() -> None:
    written = [name for stage in STAGES for name in stage.writes]
    assert len(set(written)) == len(written)
    published = {name for stage in STAGES if stage.published for name in stage.writes}
    assert published <= filenames.ALL
    assert filenames.ALL - published == {filenames.MANIFEST, *filenames.CHARTS}, "the card's stage writes these too"


def test_what_is_reused_or_proves_something_leaves_a_record() -> None:
    for stage in STAGES:
        assert stage.writes or (stage.rests_on is None and not stage.proof), stage.name


def test_the_page_lists_the_stages_with_what_they_need_and_leave() -> None:
    rows = {name: (needs, leaves) for name, needs, leaves in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    assert tuple(name for name in rows if name in NAMES) == NAMES
    for stage in STAGES:
        needs, leaves = rows[stage.name]
        assert tuple(re.findall(r"`([^`]+)`", needs)) == stage.needs, stage.name
        assert re.findall(r"`([^`]+)`", leaves)[: len(stage.writes)] == list(stage.writes), stage.name


def test_a_run_includes_the_stages_from_the_first_to_the_last() -> None:
    options = Run(Path("m.yaml"), Path("dist"), first="validate", last="card")
    assert [name for name in NAMES if options.includes(name)] == ["validate", "loaders", "verify", "card"]
    assert [stage.name for stage in OF_VARIANT] + [stage.name for stage in OF_RELEASE] == list(NAMES)
    assert stage_named("verify").marker == "verify.json"
