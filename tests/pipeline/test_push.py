"""The push, by the real client against the local Hub: with Xet, and with LFS too where files are sent.

After each test every repository passes git fsck. The release is a few bytes, except where its size matters.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, close_session, constants
from huggingface_hub.utils import _auth
from safetensors.numpy import save_file

from publisher.errors import HubError, PublisherError, PushError
from publisher.hub.client import THE_HUB, Destination
from publisher.hub.local import Fault, LocalHub, Role
from publisher.manifest.schema import Manifest
from publisher.pipeline.stages import push as stage
from publisher.pipeline.stages.push import Target, carry_out, preflight, push
from publisher.records.filenames import PER_REPOSITORY, PER_VARIANT
from publisher.records.progress import Octets
from publisher.records.publication import Pushed
from publisher.release.commitplan import dry_plan, plan_push

REPO = "team/adapter"
COMMIT = f"/{REPO}/commit/"
JOB = {"repository": "team/code", "workflow": "release.yml"}
NOT_WRITTEN = "the repository is as it was: nothing was written"

# huggingface_hub's LFS upload hands httpx2 a file in a way that httpx2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


by_either_way = pytest.mark.parametrize("hub", ["xet", "lfs"], indirect=True)


@pytest.fixture
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A Hub, the one that HF_ENDPOINT would name; nobody is logged in, and a lost answer is looked for at once."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", getattr(request, "param", "xet") == "lfs")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(_auth, "_OIDC_TOKEN_CACHE", None)
    monkeypatch.setattr(stage, "_LOOK_AGAIN", (0.0, 0.0))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with LocalHub(tmp_path / "hub", {"hf_write_token": Role.WRITE, "hf_read_token": Role.READ}) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running
        close_session()
    for repository in running.repositories():
        assert repository.fsck() == ()


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    """The client, with the write token."""
    return HfApi(endpoint=hub.endpoint, token=hub.token)


@dataclass(frozen=True)
class Release:
    """A manifest, its staged tree, and the Hub it goes to."""

    manifest: Manifest
    staged: Path
    hub: LocalHub

    def to(self, token: str, **options: Any) -> Target:
        """That Hub with this token."""
        return Target(Destination(self.hub.endpoint, token), **options)

    def push(self, **options: Any) -> Pushed:
        """Push with the write token."""
        return push(self.manifest, self.staged, target=self.to(self.hub.token, **options))

    def preflight(self, **options: Any) -> None:
        """Preflight with the write token."""
        preflight(self.manifest, self.to(self.hub.token, **options))

    @property
    def titles(self) -> list[str]:
        """The commits of the branch, newest first."""
        return [commit.title for commit in self.hub.repository(REPO).commits()]

    def is_whole(self, revision: str = "main") -> bool:
        """Whether what a client downloads at this revision is the staged tree."""
        cache = self.staged.parent / f"cache-{time.monotonic_ns()}"
        api = HfApi(endpoint=self.hub.endpoint, token=self.hub.token)
        return files_of(Path(api.snapshot_download(REPO, revision=revision, cache_dir=cache))) == files_of(self.staged)


def files_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a release."""
    ours = (path for path in folder.rglob("*") if path.is_file() and path.name != ".gitattributes")
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in ours}


def manifest_of(paths: list[str], source: dict[str, str], base: dict[str, str]) -> Manifest:
    """A manifest with a variant at each of these paths."""
    variant = {
        "label": "Tuned",
        "source": source,
        "base": base,
        "model_class": "LlamaForCausalLM",
        "adapter": {"method": "svd", "rank": 8, "dtype": "bfloat16", "layout": "uniform", "task_type": "CAUSAL_LM"},
    }
    return Manifest.model_validate(
        {
            "version": 1,
            "repo": REPO,
            "license": "mit",
            "variants": [{**variant, "path": path} for path in paths],
            "card": {"template": "lora_card.md.j2", "title": "tuned-lora", "summary": "Taken back out."},
        }
    )


def stage_files(folder: Path, manifest: Manifest) -> None:
    """What the earlier stages would leave, in a few bytes."""
    names = [*PER_REPOSITORY, *(f"{v.folder}/{name}".lstrip("/") for v in manifest.variants for name in PER_VARIANT)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}: first", encoding="utf-8")
    write_card(folder, "first")


def write_card(folder: Path, text: str) -> None:
    """A card whose metadata the Hub accepts."""
    (folder / "README.md").write_text(f"---\nlicense: mit\n---\n{text}\n", encoding="utf-8")


@pytest.fixture
def release(hub: LocalHub, api: HfApi, tmp_path: Path) -> Release:
    """A release of two variants, whose public checkpoints are on the Hub and which is not."""
    pins = []
    for repo in ("o/tuned", "o/base"):
        api.create_repo(repo)
        pins.append({"repo": repo, "revision": hub.repository(repo).head()})
    manifest = manifest_of(["/", "small/"], *pins)
    stage_files(tmp_path / "staged", manifest)
    return Release(manifest, tmp_path / "staged", hub)


@pytest.fixture
def update(release: Release) -> Release:
    """The same, published, and then changed in the card and an adapter."""
    release.push()
    write_card(release.staged, "second")
    (release.staged / "adapter_model.safetensors").write_text("second", encoding="utf-8")
    return release


BEFORE, AFTER = ["Publish tuned-lora", "initial commit"], ["Publish tuned-lora", "Publish tuned-lora", "initial commit"]


# --- one commit, or none ------------------------------------------------------------------------------------


@by_either_way
def test_a_first_push_makes_the_repository_and_one_commit(release: Release) -> None:
    outcome = release.push()
    assert (outcome.result, outcome.recovered, outcome.tag) == ("committed", False, None)
    assert outcome.commit == release.hub.repository(REPO).head()
    assert outcome.url == f"{release.hub.endpoint}/{REPO}/commit/{outcome.commit}"
    assert release.titles == BEFORE
    assert release.is_whole(outcome.commit)


@by_either_way
def test_weights_of_more_than_20_mb_travel_in_the_same_commit(release: Release) -> None:
    normal = np.random.default_rng(0).standard_normal(5_250_000, dtype=np.float32)
    save_file({"weight": normal}, release.staged / "adapter_model.safetensors")
    outcome = release.push()
    assert release.titles == BEFORE
    assert release.is_whole(outcome.commit)
    by_lfs = any(".git/info/lfs/objects/batch" in line for line in release.hub.requests)
    assert by_lfs is constants.HF_HUB_DISABLE_XET


@by_either_way
def test_large_files_are_told_before_they_are_sent_with_how_much_has_gone_before(release: Release) -> None:
    for folder, size in (("", 3_000_000), ("small/", 2_000_000)):
        (release.staged / folder / "adapter_model.safetensors").write_bytes(bytes(size))
    told: list[tuple[str, int, int]] = []

    def listen(what: str, done: int = 0, total: int = 0) -> None:
        told.append((what, done, total))

    push(release.manifest, release.staged, target=release.to(release.hub.token), progress=listen)
    assert [(what, done) for what, done, _ in told] == [
        ("uploading adapter_model.safetensors", 0),
        ("uploading small/adapter_model.safetensors", 3_000_000),
    ]
    assert all(isinstance(total, Octets) and total > 5_000_000 for *_, total in told)
    assert release.titles == BEFORE


def test_what_is_there_already_makes_no_commit(release: Release) -> None:
    first = release.push()
    again = release.push()
    assert (again.result, again.commit) == ("no changes", first.commit)
    assert release.titles == BEFORE


@by_either_way
def test_a_change_makes_one_commit_that_names_the_head_it_was_compared_with(update: Release) -> None:
    outcome = update.push()
    assert outcome.result == "committed"
    assert update.titles == AFTER
    assert update.is_whole()


@by_either_way
def test_files_of_an_earlier_release_go_in_the_same_commit_and_foreign_ones_stay(update: Release, api: HfApi) -> None:
    foreign = ["NOTICE", "small/notes.md", "other/adapter_model.safetensors"]  # other/ holds no extraction.json
    adds = [CommitOperationAdd(path, b"theirs") for path in foreign]
    api.create_commit(REPO, adds, commit_message="theirs")
    alone = replace(update, manifest=update.manifest.model_copy(update={"variants": update.manifest.variants[:1]}))
    for name in PER_VARIANT:
        (alone.staged / "small" / name).unlink()
    plan = plan_push(alone.manifest, alone.staged, at=alone.to(alone.hub.token).destination)
    assert {op.path for op in plan.operations if op.change == "deleted"} == {f"small/{name}" for name in PER_VARIANT}
    alone.push()
    assert alone.titles == ["Publish tuned-lora", "theirs", *BEFORE]
    kept = set(alone.hub.repository(REPO).files())
    assert kept == {".gitattributes", *foreign, *PER_REPOSITORY, *PER_VARIANT}


def test_a_plan_writes_nothing_and_says_why_there_is_no_head(release: Release) -> None:
    plan = dry_plan(release.manifest, release.staged)
    assert (plan.parent, plan.compared_with) == (None, "a new repository")
    assert {op.change for op in plan.operations} == {"added"}
    assert [repository.resource for repository in release.hub.repositories()] == ["models/o/base", "models/o/tuned"]


@pytest.mark.parametrize("spoil", [lambda s: (s / "extraction.json").unlink(), lambda s: (s / "x.tmp").touch()])
def test_a_tree_that_is_not_the_release_and_nothing_else_is_refused(
    release: Release, spoil: Callable[[Path], None]
) -> None:
    spoil(release.staged)
    with pytest.raises(PushError, match=r"lacks extraction\.json|holds x\.tmp"):
        release.push()
    assert len(release.hub.repositories()) == 2


# --- others who push ----------------------------------------------------------------------------------------


def test_a_head_that_moved_is_one_clear_error_and_nothing_is_written(update: Release, api: HfApi) -> None:
    target = update.to(update.hub.token)
    plan = plan_push(update.manifest, update.staged, at=target.destination)
    api.create_commit(REPO, [CommitOperationAdd("NOTICE", b"theirs")], commit_message="theirs")
    with pytest.raises(PushError, match=r"moved from \w{8} to \w{8} while this ran; nothing was written"):
        carry_out(plan, update.staged, message="late", target=target)
    assert update.titles == ["theirs", *BEFORE]


@by_either_way
def test_of_six_pushes_on_one_parent_one_wins_and_five_are_told(update: Release) -> None:
    target = update.to(update.hub.token)
    rivals = []
    for number in range(6):
        folder = update.staged.parent / str(number)
        stage_files(folder, update.manifest)
        write_card(folder, f"by {number}")
        rivals.append((plan_push(update.manifest, folder, at=target.destination), folder))

    def run(rival: tuple[Any, Path]) -> str:
        try:
            return carry_out(rival[0], rival[1], message=f"by {rival[1].name}", target=target).result
        except PushError as error:
            return error.found.rpartition("; ")[2]

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(run, rivals)) == ["committed", *["nothing was written"] * 5]
    winner, *rest = update.titles
    assert rest == BEFORE
    assert replace(update, staged=update.staged.parent / winner.removeprefix("by ")).is_whole()


# --- answers that are lost ----------------------------------------------------------------------------------

FAULTS = [{"status": 503}, {"status": 500}, {"status": 429, "retry_after": 1}, {"cut": True}]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_commit_whose_answer_is_lost_is_recognised(update: Release, fault: dict[str, Any]) -> None:
    update.hub.faults.add(Fault("POST", COMMIT, after_effect=True, **fault))
    outcome = update.push(tag="v1")
    assert (outcome.result, outcome.recovered) == ("committed", True)
    assert outcome.commit == update.hub.repository(REPO).head("v1")
    assert outcome.url.endswith(f"{REPO}/commit/{outcome.commit}")
    assert update.titles == ["Publish tuned-lora v1", *BEFORE]
    assert update.is_whole(outcome.commit)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_request_that_had_no_effect_leaves_all_as_it_was_and_the_next_run_succeeds(
    update: Release, fault: dict[str, Any]
) -> None:
    update.hub.faults.add(Fault("POST", COMMIT, **fault))
    with pytest.raises(PushError, match=NOT_WRITTEN):
        update.push(tag="v1")
    assert update.titles == BEFORE
    assert [ref.ref for ref in update.hub.repository(REPO).refs()] == ["refs/heads/main"]
    assert update.push(tag="v1").result == "committed"
    assert len([line for line in update.hub.requests if line.startswith("POST") and COMMIT in line]) == 3


def test_a_lost_commit_is_found_below_what_others_made_on_top_of_it(
    update: Release, api: HfApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed = []

    def look(_: float) -> None:
        landed.append(update.hub.repository(REPO).head())
        api.create_commit(REPO, [CommitOperationDelete("README.md")], commit_message="theirs")

    monkeypatch.setattr(stage, "_LOOK_AGAIN", (0.0,))
    monkeypatch.setattr("publisher.pipeline.stages.push.time.sleep", look)
    update.hub.faults.add(Fault("POST", COMMIT, status=504, after_effect=True))
    assert update.push().commit == landed[0]
    assert update.titles == ["theirs", *AFTER]


def test_where_the_repository_cannot_be_read_again_the_error_says_what_the_next_run_finds(update: Release) -> None:
    head = update.hub.repository(REPO).head()
    update.hub.faults.add(Fault("POST", COMMIT, cut=True, after_effect=True))
    update.hub.faults.add(Fault("GET", "/commits/main", status=403, times=9))
    with pytest.raises(PushError, match="cannot be read to see whether the commit landed"):
        update.push()
    update.hub.faults.clear()
    again = update.push()
    assert again.result == "no changes"
    assert again.commit == update.hub.repository(REPO).head() != head
    assert update.titles == AFTER


@by_either_way
def test_a_passing_fault_in_an_upload_is_overcome(update: Release) -> None:
    path = "/info/lfs/objects/batch" if constants.HF_HUB_DISABLE_XET else "/xet-write-token/"
    update.hub.faults.add(Fault("POST" if constants.HF_HUB_DISABLE_XET else "GET", path, status=503))
    assert update.push().result == "committed"
    assert update.is_whole()


@pytest.mark.parametrize("after_effect", [False, True])
def test_a_new_repository_whose_answer_is_lost_is_used(release: Release, *, after_effect: bool) -> None:
    release.hub.faults.add(Fault("POST", "/api/repos/create", status=503, after_effect=after_effect))
    if after_effect:
        assert release.push().result == "committed"
    else:
        with pytest.raises(HubError, match="answered 503"):
            release.push()
        assert len(release.hub.repositories()) == 2


# --- tags ---------------------------------------------------------------------------------------------------


def test_a_tag_is_set_on_the_commit_and_may_be_asked_for_again(release: Release) -> None:
    first = release.push(tag="v1.2.0")
    release.preflight(tag="v1.2.0")
    again = release.push(tag="v1.2.0")
    assert (first.tag, again.tag, again.result) == ("v1.2.0", "v1.2.0", "no changes")
    assert release.hub.repository(REPO).head("v1.2.0") == first.commit


def test_a_new_tag_on_an_unchanged_release_makes_no_commit(release: Release) -> None:
    first = release.push(tag="v1")
    again = release.push(tag="v2")
    assert (again.result, release.hub.repository(REPO).head("v2")) == ("no changes", first.commit)
    assert release.titles == ["Publish tuned-lora v1", "initial commit"]


def test_a_tag_is_never_moved_to_another_release(update: Release, api: HfApi) -> None:
    api.create_tag(REPO, tag="v1")
    with pytest.raises(PushError, match=r"the tag v1 is on \w{8}, and this release differs"):
        update.push(tag="v1")
    assert update.titles == BEFORE


def test_a_tag_that_points_elsewhere_is_refused_before_any_stage(update: Release, api: HfApi) -> None:
    api.create_tag(REPO, tag="v1")
    update.push()
    with pytest.raises(PushError, match=r"the tag v1 points to \w{8}"):
        update.preflight(tag="v1")


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_tag_whose_answer_is_lost_is_recognised(update: Release, fault: dict[str, Any]) -> None:
    update.hub.faults.add(Fault("POST", "/tag/", after_effect=True, **fault))
    assert update.hub.repository(REPO).head() != update.push(tag="v1").commit == update.hub.repository(REPO).head("v1")


def test_a_tag_that_could_not_be_set_is_set_by_the_next_run(update: Release) -> None:
    update.hub.faults.add(Fault("POST", "/tag/", status=503))
    with pytest.raises(PushError, match=r"committed as \w{8}, but the tag v1 is not set"):
        update.push(tag="v1")
    again = update.push(tag="v1")
    assert (again.result, update.hub.repository(REPO).head("v1")) == ("no changes", again.commit)


@pytest.mark.parametrize("tag", ["", "-v1", "v 1", "refs/tags/v1", "v1..2\n"])
def test_what_is_no_tag_name_is_refused(release: Release, tag: str) -> None:
    with pytest.raises(PushError, match="is not a tag name"):
        release.preflight(tag=tag)


# --- pull requests ------------------------------------------------------------------------------------------


@by_either_way
def test_a_pull_request_leaves_the_branch_alone(update: Release) -> None:
    outcome = update.push(pull_request=True)
    assert (outcome.result, outcome.recovered) == ("pull request", False)
    assert outcome.url == f"{update.hub.endpoint}/{REPO}/discussions/1"
    assert outcome.commit == update.hub.repository(REPO).head("refs/pr/1")
    assert update.titles == BEFORE
    assert update.is_whole(outcome.commit)


def test_a_pull_request_whose_answer_is_lost_is_recognised(update: Release) -> None:
    update.hub.faults.add(Fault("POST", COMMIT, cut=True, after_effect=True))
    outcome = update.push(pull_request=True)
    assert (outcome.result, outcome.recovered) == ("pull request", True)
    assert outcome.url == f"{update.hub.endpoint}/{REPO}/discussions/1"
    assert len(update.hub.repository(REPO).refs()) == 2


def test_an_open_pull_request_with_this_release_is_not_opened_twice(update: Release) -> None:
    first = update.push(pull_request=True)
    assert update.push(pull_request=True) == first
    assert len(update.hub.repository(REPO).refs()) == 2


def test_a_pull_request_cannot_be_tagged(release: Release) -> None:
    with pytest.raises(PushError, match="--tag marks what is on the branch"):
        release.preflight(tag="v1", pull_request=True)


# --- preflight ----------------------------------------------------------------------------------------------


def test_a_repository_that_may_be_written_passes(update: Release) -> None:
    update.preflight(tag="v1")


def test_no_token_is_refused(release: Release) -> None:
    with pytest.raises(HubError, match="there is no Hub token on this machine"):
        preflight(release.manifest, Target(THE_HUB))


@pytest.mark.parametrize(
    ("token", "message"), [("hf_read_token", "for reading only"), ("hf_unknown", "does not accept this token")]
)
def test_a_token_that_may_not_write_is_refused(update: Release, token: str, message: str) -> None:
    with pytest.raises(HubError, match=message):
        preflight(update.manifest, update.to(token))


def test_a_read_token_is_refused_by_the_push_too_with_nothing_written(update: Release) -> None:
    with pytest.raises(HubError, match=r"may not write to team/adapter"):
        push(update.manifest, update.staged, target=update.to("hf_read_token"))
    assert update.titles == BEFORE


def test_a_token_of_another_namespace_may_not_create_the_repository(release: Release) -> None:
    with pytest.raises(HubError, match=r"no repository team/adapter, and this token may not create it"):
        release.preflight()


def test_a_repository_of_ones_own_is_created(release: Release) -> None:
    mine = release.manifest.model_copy(update={"repo": "local-hub/adapter"})
    preflight(mine, release.to(release.hub.token))
    assert len(release.hub.repositories()) == 2


def test_the_hub_is_asked_whether_this_token_may_write_to_this_repository(update: Release) -> None:
    update.hub.faults.add(Fault("GET", f"/{REPO}/auth-check/write", status=403, times=2))
    with pytest.raises(HubError, match="this token may not write to team/adapter"):
        update.preflight()
    update.preflight(pull_request=True)


def test_a_checkpoint_that_readers_cannot_see_is_refused(release: Release, api: HfApi) -> None:
    api.create_repo("o/secret", private=True)
    api.create_repo(REPO)
    hidden = {"repo": "o/secret", "revision": release.hub.repository("o/secret").head()}
    manifest = manifest_of(["/"], hidden, release.manifest.variants[0].base.model_dump(exclude_none=True))
    with pytest.raises(PushError, match="o/secret cannot be seen without a token"):
        preflight(manifest, release.to(release.hub.token))


def test_local_checkpoints_are_for_a_rehearsal_only(release: Release) -> None:
    manifest = manifest_of(["/"], {"path": "tuned"}, {"path": "base"})
    with pytest.raises(PushError, match="which nobody else could check"):
        preflight(manifest, release.to(release.hub.token))
    preflight(manifest, Target(Destination(release.hub.endpoint, release.hub.token, rehearsal=True)))
    (release.staged / "small").rename(release.staged.parent / "elsewhere")
    assert dry_plan(manifest, release.staged).compared_with == "nothing: local checkpoints are only rehearsed"


# --- trusted publishing -------------------------------------------------------------------------------------


@pytest.fixture
def job(update: Release, monkeypatch: pytest.MonkeyPatch) -> Release:
    """A GitHub job that the repository trusts; no token is stored."""
    update.hub.trusted_publishers.trust(REPO, JOB)
    _in_job(update, JOB, monkeypatch)
    return update


def _in_job(release: Release, claims: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HF_OIDC_RESOURCE": REPO, **release.hub.github.job(claims)}.items():
        monkeypatch.setenv(name, value)


@by_either_way
def test_a_trusted_job_publishes_and_tags(job: Release) -> None:
    preflight(job.manifest, Target(tag="v2"))
    outcome = push(job.manifest, job.staged, target=Target(tag="v2"))
    assert outcome.result == "committed"
    assert job.hub.repository(REPO).head("v2") == outcome.commit


def test_a_job_with_another_claim_is_refused(job: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_job(job, {**JOB, "workflow": "ci"}, monkeypatch)
    with pytest.raises(HubError, match=r"trusted publishing was refused: .*no trusted publisher.*docs/releasing"):
        preflight(job.manifest, Target())


def test_a_job_without_the_permission_for_id_tokens_is_refused(job: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "unknown")
    with pytest.raises(HubError, match="trusted publishing was refused: "):
        preflight(job.manifest, Target())
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN")
    with pytest.raises(HubError, match=r"trusted publishing was refused: .*id-token: write"):
        preflight(job.manifest, Target())


def test_a_job_for_another_repository_is_refused(job: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    job.hub.trusted_publishers.trust("team/other", JOB)
    monkeypatch.setenv("HF_OIDC_RESOURCE", "team/other")
    with pytest.raises(HubError, match=r"set up for team/other.*Expected team/adapter"):
        preflight(job.manifest, Target())


def test_an_id_token_that_has_expired_is_refused(job: Release) -> None:
    job.hub.github.lifetime = -1
    with pytest.raises(HubError, match=r"trusted publishing was refused: .*Expired"):
        preflight(job.manifest, Target())


def test_a_token_that_expires_before_the_push_is_refused_with_nothing_written(
    job: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_OIDC_ID_TOKEN", job.hub.github.mint(JOB, job.hub.endpoint))
    job.hub.trusted_publishers.lifetime = 1
    preflight(job.manifest, Target())
    assert _auth._OIDC_TOKEN_CACHE is not None
    _auth._OIDC_TOKEN_CACHE["expires_at"] = float("inf")  # a clock of the client's that is behind
    time.sleep(1.1)
    with pytest.raises(HubError, match=r"does not accept this token, or it has expired.*run the job again"):
        push(job.manifest, job.staged, target=Target())
    assert job.titles == BEFORE


def test_a_hub_that_is_out_of_order_has_not_refused_a_claim(job: Release) -> None:
    job.hub.faults.add(Fault("POST", "/oauth/token", status=503))
    with pytest.raises(HubError, match=r"answered 503.*run the same command again"):
        preflight(job.manifest, Target())


# --- the card's metadata, and what an error may show --------------------------------------------------------


def test_a_card_whose_metadata_the_hub_refuses_stops_the_push(update: Release) -> None:
    (update.staged / "README.md").write_text("---\nlicense: [\n---\n", encoding="utf-8")
    with pytest.raises(HubError, match=r"does not accept the metadata of README\.md"):
        update.push()
    assert update.titles == BEFORE


def test_a_token_that_cannot_be_sent_is_not_shown(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret\x0bhidden")
    with pytest.raises(PublisherError, match="holds a character that cannot be sent") as caught:
        preflight(release.manifest, Target())
    shown = "".join(traceback.format_exception(caught.value))
    assert "cannot be sent" in shown
    assert "hf_secret" not in shown
