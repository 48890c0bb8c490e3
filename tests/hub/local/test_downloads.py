"""Reading: listings, downloads, and what is not there."""

from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from publisher.hub.local import LocalHub

CARD = b"---\nlicense: apache-2.0\ntags: [lora]\nreleased: 2026-01-02\n---\n# An adapter\n"


@pytest.fixture
def filled(api: HfApi, repo: str) -> str:
    """The commit of a card, a nested file and a large file."""
    operations = [
        CommitOperationAdd("README.md", CARD),
        CommitOperationAdd("conf/config.json", b'{"r": 8}'),
        CommitOperationAdd("weights.bin", bytes(range(256)) * 64),
    ]
    return api.create_commit(repo, operations, commit_message="fill").oid


def test_a_snapshot_at_a_commit_holds_every_byte(api: HfApi, repo: str, filled: str, tmp_path: Path) -> None:
    folder = Path(api.snapshot_download(repo, revision=filled, cache_dir=tmp_path / "cache"))
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found.pop(".gitattributes").startswith(b"*.bin filter=lfs")
    assert found == {"README.md": CARD, "conf/config.json": b'{"r": 8}', "weights.bin": bytes(range(256)) * 64}


def test_a_snapshot_of_a_tag_is_that_of_its_commit(api: HfApi, repo: str, filled: str, tmp_path: Path) -> None:
    api.create_tag(repo, tag="v1.0", revision=filled)
    api.create_commit(repo, [CommitOperationAdd("later.txt", b"later")], commit_message="later")
    folder = Path(api.snapshot_download(repo, revision="v1.0", cache_dir=tmp_path / "cache"))
    assert folder.name == filled
    assert not (folder / "later.txt").exists()


def test_one_file_is_downloaded_at_a_commit(api: HfApi, repo: str, filled: str, tmp_path: Path) -> None:
    api.create_commit(repo, [CommitOperationAdd("conf/config.json", b"{}")], commit_message="later")
    path = api.hf_hub_download(repo, "conf/config.json", revision=filled, cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == b'{"r": 8}'


def test_a_tree_lists_files_with_their_own_sizes_and_digests(api: HfApi, repo: str, filled: str) -> None:
    listed = list(api.list_repo_tree(repo, recursive=True, revision=filled))
    assert [entry.path for entry in listed] == [
        ".gitattributes",
        "README.md",
        "conf",
        "conf/config.json",
        "weights.bin",
    ]
    weights = listed[-1]
    assert isinstance(weights, RepoFile)
    assert weights.size == 256 * 64
    assert weights.lfs is not None
    assert weights.lfs.size == 256 * 64


def test_a_tree_of_one_folder_lists_that_folder(api: HfApi, repo: str, filled: str) -> None:
    assert [entry.path for entry in api.list_repo_tree(repo, "conf", revision=filled)] == ["conf/config.json"]
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(repo, "nothing", revision=filled))


def test_a_long_tree_comes_in_pages(hub: LocalHub, api: HfApi, repo: str) -> None:
    operations = [CommitOperationAdd(f"{number:04}.txt", b"x") for number in range(1100)]
    api.create_commit(repo, operations, commit_message="many")
    assert len(list(api.list_repo_tree(repo))) == 1101
    assert sum("/tree/" in request for request in hub.requests) == 2


def test_paths_are_described_and_missing_ones_left_out(api: HfApi, repo: str, filled: str) -> None:
    described = api.get_paths_info(repo, ["conf", "weights.bin", "nothing"], revision=filled)
    assert [(entry.path, type(entry).__name__) for entry in described] == [
        ("conf", "RepoFolder"),
        ("weights.bin", "RepoFile"),
    ]


def test_the_card_is_read_by_the_model_info(api: HfApi, repo: str, filled: str) -> None:
    info = api.model_info(repo, files_metadata=True)
    assert info.sha == filled
    assert info.card_data is not None
    assert info.card_data["license"] == "apache-2.0"
    assert info.tags == ["lora", "local Hub"]
    assert {s.rfilename: s.size for s in info.siblings or []}["weights.bin"] == 256 * 64


def test_downloaded_files_agree_with_the_digests_of_the_hub(api: HfApi, repo: str, filled: str, tmp_path: Path) -> None:
    api.snapshot_download(repo, revision=filled, local_dir=tmp_path / "copy")
    verified = api.verify_repo_checksums(repo, revision=filled, local_dir=tmp_path / "copy")
    assert (verified.checked_count, verified.mismatches, verified.missing_paths) == (4, [], [])


def test_a_missing_repository_is_reported_as_such(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("team/nothing")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("gpt2")
    with pytest.raises(RepositoryNotFoundError):
        api.create_commit("team/nothing", [CommitOperationAdd("a", b"a")], commit_message="m")
    with pytest.raises(RepositoryNotFoundError):
        api.hf_hub_download("team/nothing", "a", cache_dir=tmp_path)
    assert hub.repositories() == ()


def test_a_missing_revision_is_reported_as_such(api: HfApi, repo: str, tmp_path: Path) -> None:
    with pytest.raises(RevisionNotFoundError):
        api.snapshot_download(repo, revision="v9", cache_dir=tmp_path)
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download(repo, "README.md", revision="0" * 40, cache_dir=tmp_path)


def test_a_missing_file_is_reported_as_such(api: HfApi, repo: str, tmp_path: Path) -> None:
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download(repo, "nothing.txt", cache_dir=tmp_path)
    assert not api.file_exists(repo, "nothing.txt")
    assert api.file_exists(repo, ".gitattributes")
