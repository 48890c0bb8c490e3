"""Tags and branches."""

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

from publisher.hub.local import LocalHub
from publisher.hub.local.repositories import Put


@pytest.fixture
def two_commits(api: HfApi, repo: str) -> tuple[str, str]:
    """The ids of two commits, older first."""
    older, newer = (
        api.create_commit(repo, [CommitOperationAdd("a.txt", content)], commit_message="m").oid
        for content in (b"1", b"2")
    )
    return older, newer


@pytest.mark.parametrize("message", [None, "annotated"])
def test_a_tag_leads_to_its_commit(api: HfApi, repo: str, two_commits: tuple[str, str], message: str | None) -> None:
    api.create_tag(repo, tag="v1.0", revision=two_commits[0], tag_message=message)
    assert api.model_info(repo, revision="v1.0").sha == two_commits[0]
    assert [(tag.name, tag.target_commit) for tag in api.list_repo_refs(repo).tags] == [("v1.0", two_commits[0])]


@pytest.mark.parametrize("message", [None, "annotated"])
def test_a_tag_that_exists_is_refused_and_stays(
    api: HfApi, repo: str, two_commits: tuple[str, str], message: str | None
) -> None:
    older, newer = two_commits
    api.create_tag(repo, tag="v1.0", revision=older)
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_tag(repo, tag="v1.0", revision=newer, tag_message=message)
    assert caught.value.response.status_code == 409
    assert api.model_info(repo, revision="v1.0").sha == older


def test_a_moved_tag_leads_to_its_new_commit(api: HfApi, repo: str, two_commits: tuple[str, str]) -> None:
    older, newer = two_commits
    api.create_tag(repo, tag="v1.0", revision=older)
    api.delete_tag(repo, tag="v1.0")
    api.create_tag(repo, tag="v1.0", revision=newer)
    assert api.model_info(repo, revision="v1.0").sha == newer


def test_a_tag_on_a_missing_revision_is_refused(api: HfApi, repo: str) -> None:
    with pytest.raises(RevisionNotFoundError):
        api.create_tag(repo, tag="v1.0", revision="0" * 40)


def test_a_tag_cannot_be_committed_to(hub: LocalHub, api: HfApi, repo: str) -> None:
    api.create_tag(repo, tag="v1.0")
    with pytest.raises(RevisionNotFoundError):
        api.create_commit(
            repo, [CommitOperationAdd("a", b"a")], commit_message="m", revision="refs/tags/v1.0", create_pr=False
        )
    assert len(hub.repository(repo).commits()) == 1


def test_a_branch_starts_where_it_is_told_to(
    hub: LocalHub, api: HfApi, repo: str, two_commits: tuple[str, str]
) -> None:
    api.create_branch(repo, branch="release/1", revision=two_commits[0])
    assert hub.repository(repo).head("release/1") == two_commits[0]
    api.create_commit(repo, [CommitOperationAdd("b", b"b")], commit_message="on it", revision="release/1")
    assert len(hub.repository(repo).commits("release/1")) == 3
    assert hub.repository(repo).head() == two_commits[1]


def test_a_branch_that_exists_is_refused(api: HfApi, repo: str) -> None:
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_branch(repo, branch="main")
    assert caught.value.response.status_code == 409


def test_a_deleted_branch_is_gone(api: HfApi, repo: str) -> None:
    api.create_branch(repo, branch="dev")
    api.delete_branch(repo, branch="dev")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(repo, revision="dev")


def test_the_main_branch_cannot_be_deleted(hub: LocalHub, api: HfApi, repo: str) -> None:
    with pytest.raises(HfHubHTTPError, match="Cannot delete refs/heads/main"):
        api.delete_branch(repo, branch="main")
    assert len(hub.repository(repo).commits()) == 1


def test_an_abbreviated_commit_is_found_and_a_blob_is_not(hub: LocalHub, api: HfApi, repo: str) -> None:
    head = hub.repository(repo).head()
    assert api.model_info(repo, revision=head[:8]).sha == head
    with pytest.raises(RevisionNotFoundError):
        api.model_info(repo, revision=hub.repository(repo).files()[".gitattributes"].oid)


def test_the_history_is_listed_in_pages(hub: LocalHub, api: HfApi, repo: str) -> None:
    repository = hub.repository(repo)
    for number in range(53):
        tree = repository.tree_with([Put("n", str(number).encode())], start="main")
        repository.commit(tree, f"commit {number}", ref="refs/heads/main", parent=repository.head())
    listed = api.list_repo_commits(repo)
    assert [commit.title for commit in listed][:2] == ["commit 52", "commit 51"]
    assert len(listed) == 54
