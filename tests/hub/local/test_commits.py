"""Commits of the real client, and what the bare repository holds afterwards."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError

from publisher.hub.local import LocalHub
from publisher.hub.local.refusals import Refusal
from publisher.hub.local.repositories import Delete, Put


def add(path: str, content: bytes) -> list[CommitOperationAdd]:
    return [CommitOperationAdd(path, content)]


def titles(hub: LocalHub, repo: str, revision: str = "main") -> list[str]:
    return [commit.title for commit in hub.repository(repo).commits(revision)]


def test_a_new_repository_has_one_commit_as_on_the_hub(hub: LocalHub, repo: str) -> None:
    assert titles(hub, repo) == ["initial commit"]
    assert list(hub.repository(repo).files()) == [".gitattributes"]


def test_creating_a_repository_twice_is_refused_unless_that_is_fine(api: HfApi, repo: str) -> None:
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_repo(repo)
    assert caught.value.response.status_code == 409
    assert api.create_repo(repo, exist_ok=True).repo_id == repo


def test_files_are_committed_at_once_and_git_reads_them(hub: LocalHub, api: HfApi, repo: str) -> None:
    made = api.create_commit(
        repo,
        [
            CommitOperationAdd("README.md", b"---\nlicense: mit\n---\n"),
            CommitOperationAdd("deep/er/config.json", b"{}"),
        ],
        commit_message="Release",
        commit_description="All of it.",
    )
    assert made.oid == hub.repository(repo).head()
    assert titles(hub, repo) == ["Release", "initial commit"]
    assert hub.repository(repo).commits()[0].message == "All of it."
    shown = subprocess.run(
        ["git", "-C", hub.repository(repo).folder, "show", "main:deep/er/config.json"], capture_output=True, check=True
    )
    assert shown.stdout == b"{}"


def test_a_file_or_a_folder_is_deleted_in_a_commit(hub: LocalHub, api: HfApi, repo: str) -> None:
    added = [CommitOperationAdd(path, b"x") for path in ("a.txt", "old/b.txt", "old/c/d.txt", "older.txt", "odd/e.txt")]
    api.create_commit(repo, added, commit_message="add")
    deleted = [CommitOperationDelete("a.txt"), CommitOperationDelete("old/"), CommitOperationDelete("odd")]
    api.create_commit(repo, deleted, commit_message="delete")
    assert list(hub.repository(repo).files()) == [".gitattributes", "older.txt"]


def test_deleting_what_is_not_there_changes_nothing(hub: LocalHub, api: HfApi, repo: str) -> None:
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit(repo, [CommitOperationDelete("nothing.txt")], commit_message="delete")
    assert caught.value.response.headers["X-Error-Code"] == "EntryNotFound"
    assert titles(hub, repo) == ["initial commit"]


def test_committing_what_is_there_already_makes_no_commit(hub: LocalHub, api: HfApi, repo: str) -> None:
    first = api.create_commit(repo, add("a.txt", b"a"), commit_message="first")
    again = api.create_commit(repo, add("a.txt", b"a"), commit_message="again")
    assert again.oid == first.oid
    assert titles(hub, repo) == ["first", "initial commit"]


def test_a_commit_on_a_stale_parent_is_refused(hub: LocalHub, api: HfApi, repo: str) -> None:
    parent = hub.repository(repo).head()
    api.create_commit(repo, add("a.txt", b"a"), commit_message="first", parent_commit=parent)
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit(repo, add("b.txt", b"b"), commit_message="late", parent_commit=parent)
    assert caught.value.response.status_code == 412
    assert titles(hub, repo) == ["first", "initial commit"]


def test_of_six_pushes_on_one_parent_one_wins(hub: LocalHub, api: HfApi, repo: str) -> None:
    parent = hub.repository(repo).head()

    def push(number: int) -> int:
        try:
            content = add("number.txt", str(number).encode())
            api.create_commit(repo, content, commit_message=f"push {number}", parent_commit=parent)
        except HfHubHTTPError as refused:
            return refused.response.status_code
        return 200

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(push, range(6))) == [200, 412, 412, 412, 412, 412]
    assert len(titles(hub, repo)) == 2


def test_the_tip_is_compared_once_more_when_the_branch_is_moved(hub: LocalHub, repo: str) -> None:
    repository = hub.repository(repo)
    parent = repository.head()
    mine, theirs = (repository.tree_with([Put(name, b"x")], start=parent) for name in ("mine", "theirs"))
    repository.commit(theirs, "theirs", ref="refs/heads/main", parent=parent)
    with pytest.raises(Refusal) as caught:
        repository.commit(mine, "mine", ref="refs/heads/main", parent=parent)
    assert caught.value.status == 412
    assert titles(hub, repo) == ["theirs", "initial commit"]


@pytest.mark.parametrize("path", ["../outside", "a/../../outside", ".git/config", "/etc/passwd", "..\\\\windows", ""])
def test_a_path_that_leaves_the_repository_is_refused(hub: LocalHub, repo: str, path: str) -> None:
    repository = hub.repository(repo)
    with pytest.raises(Refusal) as caught:
        repository.tree_with([Put(path, b"x")], start="main")
    assert caught.value.status == 422


def test_changes_are_made_in_their_order(hub: LocalHub, repo: str) -> None:
    repository = hub.repository(repo)
    tree = repository.tree_with([Put("a", b"1"), Delete("a"), Put("a", b"2")], start="main")
    repository.commit(tree, "both", ref="refs/heads/main", parent=repository.head())
    assert repository.read(repository.files()["a"]) == b"2"


def test_a_pull_request_leaves_the_branch_alone(hub: LocalHub, api: HfApi, repo: str) -> None:
    made = api.create_commit(repo, add("a.txt", b"a"), commit_message="Please take", create_pr=True)
    assert made.pr_revision == "refs/pr/1"
    assert titles(hub, repo) == ["initial commit"]
    assert titles(hub, repo, "refs/pr/1") == ["Please take", "initial commit"]
    assert api.get_discussion_details(repo, 1).title == "Please take"
    api.create_commit(repo, add("b.txt", b"b"), commit_message="More", revision="refs/pr/1")
    assert len(titles(hub, repo, "refs/pr/1")) == 3


def test_a_pull_request_whose_changes_are_refused_is_not_opened(hub: LocalHub, api: HfApi, repo: str) -> None:
    with pytest.raises(HfHubHTTPError):
        api.create_commit(repo, [CommitOperationDelete("nothing")], commit_message="Please take", create_pr=True)
    assert [ref.ref for ref in hub.repository(repo).refs()] == ["refs/heads/main"]


def test_a_folder_is_uploaded_and_opened_as_a_pull_request(
    hub: LocalHub, api: HfApi, repo: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# hi\n")
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 1000)
    first = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Folder")
    assert api.upload_folder(repo_id=repo, folder_path=folder).oid == first.oid
    (folder / "more.txt").write_text("more")
    api.upload_folder(repo_id=repo, folder_path=folder, create_pr=True)
    assert titles(hub, repo) == ["Folder", "initial commit"]
    assert "more.txt" in hub.repository(repo).files("refs/pr/1")


def test_a_deleted_repository_is_gone(hub: LocalHub, api: HfApi, repo: str) -> None:
    api.delete_repo(repo)
    assert not api.repo_exists(repo)
    assert hub.repositories() == ()


def test_a_dataset_is_kept_apart_from_a_model_of_its_name(hub: LocalHub, api: HfApi, repo: str) -> None:
    api.create_repo(repo, repo_type="dataset")
    api.create_commit(repo, add("rows.csv", b"1,2"), commit_message="rows", repo_type="dataset")
    assert titles(hub, repo) == ["initial commit"]
    assert len(hub.repository(repo, kind="datasets").commits()) == 2


def test_a_local_hub_serves_what_an_earlier_one_left(tmp_path: Path) -> None:
    with LocalHub(tmp_path / "kept") as first:
        HfApi(endpoint=first.endpoint, token=first.token).create_repo("team/kept")
    with LocalHub(tmp_path / "kept") as second:
        assert HfApi(endpoint=second.endpoint, token=second.token).repo_exists("team/kept")
