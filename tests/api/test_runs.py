"""`publisher.run`, `validate`, `verify`, `audit` and `load_manifest`: what the command line does, as values."""

import shutil
from pathlib import Path

import pytest

import publisher

pytestmark = pytest.mark.usefixtures("quick_read_back")

RELEASES = Path(__file__).parents[1] / "releases"


def test_a_manifest_is_read(own_small_run: Path) -> None:
    assert own_small_run.is_dir()
    manifest = publisher.load_manifest("demo.yaml")
    assert [variant.path for variant in manifest.variants] == ["/", "clef-flash/"]


def test_every_problem_of_a_manifest_is_told(own_small_run: Path) -> None:
    text = (own_small_run / "demo.yaml").read_text()
    (own_small_run / "demo.yaml").write_text(text.replace("method: svd", "method: qr").replace("license:", "licence:"))
    with pytest.raises(publisher.ManifestError) as caught:
        publisher.load_manifest("demo.yaml")
    assert "licence" in str(caught.value)
    assert "method" in str(caught.value)


def test_a_run_that_was_finished_is_reused_and_says_what_it_would_commit(own_small_run: Path) -> None:
    outcome = publisher.run(own_small_run / "demo.yaml", dry_run=True, device="cpu")
    assert [variant.summary.linears for variant in outcome.variants if variant.summary] == [31, 31]
    assert "extract" in outcome.variants[0].reused
    assert outcome.plan is not None
    assert outcome.push is None


def test_a_rehearsal_commits_to_a_local_hub_and_prints_nothing(
    own_small_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert own_small_run.is_dir()
    outcome = publisher.run("demo.yaml", first="push", rehearse=True, tag="v1")
    assert outcome.push is not None
    assert outcome.push.tag == "v1"
    assert outcome.push.read_back is not None
    assert capfd.readouterr() == ("", "")


def test_one_variant_is_validated_and_verified_again(own_small_run: Path) -> None:
    assert own_small_run.is_dir()
    [validated] = publisher.validate("demo.yaml", variants="clef-flash", device="cpu").variants
    assert validated.validation is not None
    assert validated.validation.modules == 31
    [verified] = publisher.verify("demo.yaml", variants=["clef-flash/"], device="cpu").variants
    assert verified.verification is not None
    assert verified.verification.sets[0].answers_changed == 0


@pytest.mark.parametrize(
    ("first", "last", "what"),
    [
        ("card", "extract", "the first stage, card, comes after the last, extract"),
        ("cart", "push", "there is no stage 'cart'"),
        ("fetch", "pull", "there is no stage 'pull'"),
    ],
)
def test_stages_that_cannot_be_are_refused(first: str, last: str, what: str) -> None:
    with pytest.raises(publisher.ManifestError, match=what):
        publisher.run("demo.yaml", first=first, last=last)


def test_an_option_that_there_is_not_is_the_caller_s_mistake() -> None:
    with pytest.raises(TypeError, match="dryrun"):
        publisher.run("demo.yaml", dryrun=True)  # type: ignore[call-arg]


def test_a_release_is_audited_and_what_fails_is_named(tmp_path: Path) -> None:
    release = shutil.copytree(RELEASES / "0.2.0-svd" / "release", tmp_path / "release")
    assert publisher.audit(release).failed == ()
    (release / "README.md").write_text("Better than the release.")
    assert "card" in {check.name for check in publisher.audit(str(release)).failed}


def test_a_target_that_is_no_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(publisher.FetchError):
        publisher.audit(tmp_path)
    with pytest.raises(publisher.ManifestError):
        publisher.audit("not a repository")
