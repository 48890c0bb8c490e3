"""The card again from the published evidence, committed to a local Hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from publisher.errors import CardError
from publisher.hub.client import Destination, list_files
from publisher.hub.local import LocalHub
from publisher.manifest.reading import load_manifest
from publisher.pipeline.republish import card_from_hub
from publisher.pipeline.stages.push import Target, push

REPO = "demo/clef-lora"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def target(own_small_run: Path, hub: LocalHub) -> Target:
    """The demo's release, published."""
    target = Target(Destination(hub.endpoint, hub.token, rehearsal=True))
    push(load_manifest(own_small_run / "demo.yaml"), own_small_run / "dist" / "demo", target=target)
    return target


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def changed_since(hub: LocalHub, target: Target, before: str) -> list[str]:
    """Paths whose content differs between a commit and the head."""
    then, now = (
        {file.path: file.blob for file in list_files(REPO, commit, at=target.destination)}
        for commit in (before, hub.repository(REPO).head())
    )
    return sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))


def test_a_card_that_is_what_its_evidence_gives_makes_no_commit(hub: LocalHub, target: Target) -> None:
    before = hub.repository(REPO).head()
    done = card_from_hub(Path("demo.yaml"), write=True, target=target)
    assert done.push is not None
    assert (done.diff, done.push.result, hub.repository(REPO).head()) == ("", "no changes", before)


def test_another_template_changes_the_readme_alone(hub: LocalHub, target: Target) -> None:
    before = hub.repository(REPO).head()
    Path("usage_peft.md.j2").write_text("Load it with PEFT.\n")
    done = card_from_hub(Path("demo.yaml"), write=True, target=target)
    assert "+Load it with PEFT." in done.diff
    assert done.push is not None
    assert done.push.result == "committed"
    assert changed_since(hub, target, before) == ["README.md"]


def test_a_corrected_summary_takes_the_manifests_copy_along(hub: LocalHub, target: Target) -> None:
    before = hub.repository(REPO).head()
    edit(Path("demo.yaml"), "two small merged fine-tunes", "two merged fine-tunes")
    diff = card_from_hub(Path("demo.yaml"), write=True, target=target).diff
    assert "+> Adapters taken back out of two merged" in diff
    assert changed_since(hub, target, before) == ["README.md", "manifest.yaml"]


def test_without_push_the_difference_is_shown_and_nothing_is_written(hub: LocalHub, target: Target) -> None:
    before = hub.repository(REPO).head()
    edit(Path("demo.yaml"), "title: clef-lora", "title: clef adapters")
    done = card_from_hub(Path("demo.yaml"), write=False, target=target)
    assert "+# clef adapters" in done.diff
    assert (done.push, hub.repository(REPO).head()) == (None, before)


def test_a_manifest_of_another_recipe_is_refused(hub: LocalHub, target: Target) -> None:
    before = hub.repository(REPO).head()
    edit(Path("demo.yaml"), "dtype: bfloat16", "dtype: float32")
    with pytest.raises(CardError, match="dtype"):
        card_from_hub(Path("demo.yaml"), write=True, target=target)
    assert hub.repository(REPO).head() == before
