"""Large files: by Xet, by LFS, and what each leaves for the other."""

import io
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from safetensors.numpy import save_file

from publisher.hub.local import LocalHub, Role
from publisher.hub.local.lfs import Pointer, pointer_in
from publisher.hub.local.xet_format import chunk_offsets

Client = Callable[..., CompletedProcess[str]]
NAME = "adapter_model.safetensors"
UPLOAD = """
from huggingface_hub import CommitOperationAdd, HfApi
HfApi().create_commit("team/adapter", [CommitOperationAdd("adapter_model.safetensors", "weights.safetensors")],
                      commit_message="weights")
"""
DOWNLOAD = """
from pathlib import Path
from subprocess import CompletedProcess
from huggingface_hub import hf_hub_download
path = hf_hub_download("team/adapter", "adapter_model.safetensors", local_dir="downloaded")
"""
WITHOUT_XET = {"HF_HUB_DISABLE_XET": "1"}

# huggingface_hub's LFS upload hands httpx2 a file in a way that httpx2 warns of.
its_own_warning = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """21 MB of float32 weights, as a safetensors file."""
    path = tmp_path / "weights.safetensors"
    normal = np.random.default_rng(0).standard_normal(5_250_000, dtype=np.float32)
    save_file({"weight": normal}, path)
    return path


def stored(hub: LocalHub, api: HfApi, repo: str) -> RepoFile:
    """How the one large file is listed, once git is seen to hold only its pointer."""
    repository = hub.repository(repo)
    assert pointer_in(repository.read(repository.files()[NAME])) is not None
    (listed,) = api.get_paths_info(repo, [NAME])
    assert isinstance(listed, RepoFile)
    return listed


def test_weights_travel_by_xet_with_the_default_client(
    hub: LocalHub, api: HfApi, repo: str, weights: Path, tmp_path: Path
) -> None:
    api.create_commit(repo, [CommitOperationAdd(NAME, weights)], commit_message="weights")
    assert stored(hub, api, repo).xet_hash is not None
    path = api.hf_hub_download(repo, NAME, cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == weights.read_bytes()
    assert any("/v1/reconstructions/" in request and request.endswith("200") for request in hub.requests)
    assert not any("/lfs/" in request for request in hub.requests)


def test_float_weights_come_in_chunks_grouped_by_four(
    hub: LocalHub, api: HfApi, repo: str, weights: Path, tmp_path: Path
) -> None:
    api.create_commit(repo, [CommitOperationAdd(NAME, weights)], commit_message="weights")
    assert len(hub.repository(repo).commits()) == 2
    xorbs = [path.read_bytes() for path in (tmp_path / "hub" / "xet" / "xorbs").iterdir()]
    assert 2 in {xorb[offset + 4] for xorb in xorbs for offset in chunk_offsets(xorb)[:-1]}


def test_weights_travel_by_lfs_when_xet_is_disabled(
    hub: LocalHub, api: HfApi, repo: str, client: Client, weights: Path, tmp_path: Path
) -> None:
    done = client(UPLOAD + DOWNLOAD, HF_TOKEN=hub.token, **WITHOUT_XET)
    assert done.returncode == 0, done.stderr
    assert stored(hub, api, repo).xet_hash is None
    assert (tmp_path / "downloaded" / NAME).read_bytes() == weights.read_bytes()
    assert not any("/xet/" in request for request in hub.requests)


def test_what_came_by_xet_is_downloaded_without_it(
    hub: LocalHub, api: HfApi, repo: str, client: Client, weights: Path, tmp_path: Path
) -> None:
    api.create_commit(repo, [CommitOperationAdd(NAME, weights)], commit_message="weights")
    done = client(DOWNLOAD, **WITHOUT_XET)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "downloaded" / NAME).read_bytes() == weights.read_bytes()
    assert f"GET /lfs/{sha256(weights.read_bytes()).hexdigest()} 200" in hub.requests


@its_own_warning
def test_what_came_by_lfs_is_downloaded_by_the_default_client(
    hub: LocalHub, api: HfApi, repo: str, tmp_path: Path
) -> None:
    content = os.urandom(100_000)
    api.create_commit(repo, [CommitOperationAdd(NAME, io.BytesIO(content))], commit_message="by LFS, as a stream is")
    assert stored(hub, api, repo).xet_hash is None
    assert Path(api.hf_hub_download(repo, NAME, cache_dir=tmp_path / "cache")).read_bytes() == content


@its_own_warning
def test_a_large_lfs_file_is_uploaded_in_parts(tmp_path: Path) -> None:
    content = os.urandom(2_500_000)
    with LocalHub(tmp_path / "hub", {"hf_write": Role.WRITE}, part_size=1_000_000) as hub:
        api = HfApi(endpoint=hub.endpoint, token=hub.token)
        api.create_repo("team/adapter")
        api.create_commit("team/adapter", [CommitOperationAdd(NAME, io.BytesIO(content))], commit_message="parts")
        assert sum("/parts/" in request for request in hub.requests) == 3
        path = api.hf_hub_download("team/adapter", NAME, cache_dir=tmp_path / "cache")
        assert Path(path).read_bytes() == content
        assert [file.name for file in (tmp_path / "hub" / "lfs").iterdir()] == [sha256(content).hexdigest()]
        assert hub.repository("team/adapter").fsck() == ()


def test_weights_that_are_here_are_not_committed_again(hub: LocalHub, api: HfApi, repo: str, weights: Path) -> None:
    first, again = (
        api.create_commit(repo, [CommitOperationAdd(NAME, weights)], commit_message="weights").oid for _ in range(2)
    )
    assert first == again
    assert len(hub.repository(repo).commits()) == 2


def test_the_header_of_remote_weights_is_read_without_their_download(
    hub: LocalHub, api: HfApi, repo: str, weights: Path
) -> None:
    api.create_commit(repo, [CommitOperationAdd(NAME, weights)], commit_message="weights")
    metadata = api.parse_safetensors_file_metadata(repo, NAME)
    assert metadata.tensors["weight"].shape == [5_250_000]
    assert any(request.startswith("GET /lfs/") and request.endswith(" 206") for request in hub.requests)


def test_content_that_is_not_what_it_was_announced_as_is_not_kept(hub: LocalHub, repo: str, tmp_path: Path) -> None:
    announced = {"operation": "upload", "objects": [{"oid": sha256(b"this").hexdigest(), "size": 4}]}
    batch = f"{hub.endpoint}/{repo}.git/info/lfs/objects/batch"
    offered = get_session().post(batch, json=announced, headers={"Authorization": f"Bearer {hub.token}"}).json()
    answer = get_session().put(offered["objects"][0]["actions"]["upload"]["href"], content=b"that")
    assert answer.status_code == 400
    assert list((tmp_path / "hub" / "lfs").iterdir()) == []


def test_a_commit_of_content_that_was_never_uploaded_is_refused(hub: LocalHub, api: HfApi, repo: str) -> None:
    addition = CommitOperationAdd(NAME, b"\0weights")
    addition._upload_mode, addition._should_ignore, addition._is_uploaded = "lfs", False, True
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit(repo, [addition], commit_message="pointer to nothing")
    assert caught.value.response.status_code == 400
    assert len(hub.repository(repo).commits()) == 1


def test_a_damaged_shard_is_refused(hub: LocalHub, api: HfApi, repo: str) -> None:
    asked = get_session().get(
        f"{hub.endpoint}/api/models/{repo}/xet-write-token/main", headers={"Authorization": f"Bearer {hub.token}"}
    )
    answer = get_session().post(
        f"{asked.json()['casUrl']}/v1/shards",
        content=b"\0" * 60,
        headers={"Authorization": f"Bearer {asked.json()['accessToken']}"},
    )
    assert answer.status_code == 400
    assert api.whoami()["fullname"] == "local Hub"


def test_a_pointer_is_read_back_as_it_was_written() -> None:
    pointer = Pointer("a" * 64, 12)
    assert pointer_in(pointer.encoded()) == pointer
    assert pointer_in(pointer.encoded() + b"x") is None
