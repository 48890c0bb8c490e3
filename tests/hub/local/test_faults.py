"""Faults on demand: what the real client meets, and what the repository holds afterwards."""

import time
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from publisher.hub.local import Fault, LocalHub


def add() -> list[CommitOperationAdd]:
    """A small file; the client takes each operation once only."""
    return [CommitOperationAdd("a.txt", b"a")]


def titles(hub: LocalHub, repo: str) -> list[str]:
    return [commit.title for commit in hub.repository(repo).commits()]


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("after_effect", [False, True])
def test_a_commit_that_is_answered_with_an_error_may_have_landed(
    hub: LocalHub, api: HfApi, repo: str, status: int, *, after_effect: bool
) -> None:
    hub.faults.add(Fault("POST", "/commit/main$", status=status, after_effect=after_effect))
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit(repo, add(), commit_message="spoilt")
    assert caught.value.response.status_code == status
    assert titles(hub, repo) == (["spoilt", "initial commit"] if after_effect else ["initial commit"])


@pytest.mark.parametrize("after_effect", [False, True])
def test_a_connection_is_cut_before_or_after_the_commit(
    hub: LocalHub, api: HfApi, repo: str, *, after_effect: bool
) -> None:
    hub.faults.add(Fault("POST", "/commit/", cut=True, after_effect=after_effect))
    with pytest.raises(httpx2.TransportError):
        api.create_commit(repo, add(), commit_message="cut")
    assert titles(hub, repo) == (["cut", "initial commit"] if after_effect else ["initial commit"])


def test_a_second_try_after_a_lost_answer_finds_its_commit_there(hub: LocalHub, api: HfApi, repo: str) -> None:
    parent = hub.repository(repo).head()
    hub.faults.add(Fault("POST", "/commit/", status=503, after_effect=True))
    with pytest.raises(HfHubHTTPError):
        api.create_commit(repo, add(), commit_message="once", parent_commit=parent)
    again = api.create_commit(repo, add(), commit_message="once more", parent_commit=parent)
    assert again.oid == hub.repository(repo).head()
    assert titles(hub, repo) == ["once", "initial commit"]


def test_the_clients_own_retry_after_a_lost_answer_is_refused_as_stale(
    hub: LocalHub, api: HfApi, repo: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a")
    parent = hub.repository(repo).head()
    hub.faults.add(Fault("POST", "/commit/", status=503, after_effect=True))
    with pytest.raises(HfHubHTTPError) as caught:
        api.upload_folder(repo_id=repo, folder_path=tmp_path / "folder", commit_message="once", parent_commit=parent)
    assert caught.value.response.status_code == 412
    assert titles(hub, repo) == ["once", "initial commit"]


def test_the_client_waits_as_long_as_it_is_asked_to_and_tries_again(hub: LocalHub, api: HfApi, repo: str) -> None:
    hub.faults.add(Fault("POST", "/preupload/", status=429, retry_after=1))
    started = time.monotonic()
    api.create_commit(repo, add(), commit_message="patient")
    assert time.monotonic() - started > 1
    assert titles(hub, repo) == ["patient", "initial commit"]
    assert [request.split()[-1] for request in hub.requests if "/preupload/" in request] == ["429", "200"]


def test_a_fault_happens_as_often_as_it_was_asked_for(hub: LocalHub, api: HfApi, repo: str) -> None:
    hub.faults.add(Fault("POST", "/commit/", status=500, times=2))
    for _ in range(2):
        with pytest.raises(HfHubHTTPError):
            api.create_commit(repo, add(), commit_message="spoilt")
    api.create_commit(repo, add(), commit_message="good")
    assert titles(hub, repo) == ["good", "initial commit"]


def test_cleared_faults_do_not_happen(hub: LocalHub, api: HfApi, repo: str) -> None:
    hub.faults.add(Fault("POST", "/commit/", status=500))
    hub.faults.clear()
    api.create_commit(repo, add(), commit_message="good")
    assert titles(hub, repo) == ["good", "initial commit"]


def test_a_delay_alone_holds_up_the_right_answer(hub: LocalHub, api: HfApi) -> None:
    hub.faults.add(Fault("GET", "/api/whoami-v2", delay=0.3))
    started = time.monotonic()
    assert api.whoami()["fullname"] == "local Hub"
    assert time.monotonic() - started > 0.3


def test_a_commit_with_a_large_body_is_answered_with_its_fault(hub: LocalHub, api: HfApi, repo: str) -> None:
    hub.faults.add(Fault("POST", "/commit/", status=503))
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit(repo, [CommitOperationAdd("a.txt", b"a" * 4_000_000)], commit_message="large")
    assert caught.value.response.status_code == 503
    assert titles(hub, repo) == ["initial commit"]


def test_xet_uploads_survive_a_passing_fault(hub: LocalHub, api: HfApi, repo: str) -> None:
    hub.faults.add(Fault("POST", "/v1/xorbs/", status=503))
    content = bytes(range(256)) * 400
    api.create_commit(repo, [CommitOperationAdd("weights.bin", content)], commit_message="weights")
    assert titles(hub, repo) == ["weights", "initial commit"]


def test_an_answer_breaks_off_where_it_was_asked_to(hub: LocalHub, api: HfApi, repo: str) -> None:
    content = bytes(range(256)) * 4
    api.create_commit(repo, [CommitOperationAdd("weights.bin", content)], commit_message="weights")
    hub.faults.add(Fault("GET", "^/lfs/", cut_after=300))
    address, before = f"{hub.endpoint}/{repo}/resolve/main/weights.bin", hub.bytes_sent
    with httpx2.stream("GET", address, follow_redirects=True) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == content[:300]
        with pytest.raises(httpx2.RemoteProtocolError):
            next(pieces)
    assert hub.bytes_sent == before + 300
    assert httpx2.get(address, follow_redirects=True).content == content
