"""Tokens: who may read and who may write, and that no token is ever repeated."""

import logging
from collections.abc import Callable

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, get_session
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from publisher.hub.local import LocalHub
from publisher.hub.local.repositories import Repository

Attempts = list[Callable[[], object]]


def add() -> list[CommitOperationAdd]:
    """A small file; the client takes each operation once only."""
    return [CommitOperationAdd("a.txt", b"a")]


def broken(*_: object, **__: object) -> None:
    """What a fault of the server looks like."""
    raise RuntimeError("the server breaks")


def with_token(hub: LocalHub, token: str | bool) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=token)


def test_everyone_reads_and_a_read_token_too(hub: LocalHub, repo: str) -> None:
    for token in (False, "hf_read_token"):
        assert with_token(hub, token).model_info(repo).sha == hub.repository(repo).head()


def test_a_read_token_is_refused_every_write(hub: LocalHub, repo: str) -> None:
    reader = with_token(hub, "hf_read_token")
    attempts: Attempts = [
        lambda: reader.create_commit(repo, add(), commit_message="m"),
        lambda: reader.create_commit(repo, add(), commit_message="m", create_pr=True),
        lambda: reader.create_tag(repo, tag="v1"),
        lambda: reader.auth_check(repo, write=True),
        lambda: reader.create_branch(repo, branch="dev"),
        lambda: reader.create_repo("team/other"),
        lambda: reader.delete_repo(repo),
    ]
    for attempt in attempts:
        with pytest.raises(HfHubHTTPError) as caught:
            attempt()
        assert caught.value.response.status_code == 403
        assert "may only read" in str(caught.value)
    assert [ref.ref for ref in hub.repository(repo).refs()] == ["refs/heads/main"]
    assert len(hub.repository(repo).commits()) == 1


def test_who_may_read_or_write_is_told_without_doing_so(hub: LocalHub, api: HfApi, repo: str) -> None:
    with_token(hub, "hf_read_token").auth_check(repo)
    api.auth_check(repo, write=True)
    with pytest.raises(RepositoryNotFoundError):
        api.auth_check("team/none", write=True)
    assert len(hub.repository(repo).commits()) == 1


def test_a_bad_token_is_refused_even_for_reading(hub: LocalHub, repo: str) -> None:
    stranger = with_token(hub, "hf_unknown")
    attempts: Attempts = [
        lambda: stranger.model_info(repo),
        lambda: stranger.create_commit(repo, add(), commit_message="m"),
    ]
    for attempt in attempts:
        with pytest.raises(HfHubHTTPError) as caught:
            attempt()
        assert caught.value.response.status_code == 401
        assert "Invalid credentials" in str(caught.value)
        assert not isinstance(caught.value, RepositoryNotFoundError)


def test_writing_without_a_token_is_refused(hub: LocalHub, repo: str) -> None:
    with pytest.raises(HfHubHTTPError) as caught:
        with_token(hub, token=False).create_commit(repo, add(), commit_message="m")
    assert caught.value.response.status_code == 401
    assert len(hub.repository(repo).commits()) == 1


def test_whoami_tells_the_role_of_the_token(hub: LocalHub) -> None:
    assert with_token(hub, "hf_read_token").whoami()["auth"]["accessToken"]["role"] == "read"
    assert with_token(hub, "hf_write_token").whoami()["fullname"] == "local Hub"


def test_a_private_repository_is_hidden_from_callers_without_a_token(hub: LocalHub, api: HfApi) -> None:
    api.create_repo("team/secret", private=True)
    assert api.model_info("team/secret").private
    with pytest.raises(RepositoryNotFoundError):
        with_token(hub, token=False).model_info("team/secret")


def test_xet_storage_takes_no_other_token_than_its_own(hub: LocalHub, api: HfApi, repo: str) -> None:
    asked = get_session().get(f"{hub.endpoint}/api/models/{repo}/xet-read-token/main")
    cas, reading = asked.json()["casUrl"], asked.json()["accessToken"]
    for token in ("none", hub.token, reading):
        answer = get_session().post(f"{cas}/v1/shards", content=b"", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 401
    assert api.whoami()["name"]


def test_no_token_enters_a_log_or_an_answer(
    hub: LocalHub,
    repo: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(Repository, "files", broken)
    id_token = hub.github.mint({"repository": "someone/else"}, hub.endpoint)
    secrets = ["hf_write_token", "hf_read_token", "hf_stranger_token", id_token]
    answers = [
        get_session().request(method, f"{hub.endpoint}{path}", headers={"Authorization": f"Bearer {token}"}, json=body)
        for token in secrets
        for method, path, body in (
            ("GET", "/api/whoami-v2", None),
            ("POST", f"/api/models/{repo}/tag/main", {"tag": "not..allowed"}),
            ("POST", f"/api/models/{repo}/preupload/main", {"files": [{"path": token}]}),  # where the server breaks
            ("POST", "/oauth/token", {"subject_token": id_token, "resource": repo}),
            ("GET", "/github/id-token?audience=x", None),
        )
    ]
    assert 500 in {answer.status_code for answer in answers}
    shown = caplog.text + "".join(capfd.readouterr()) + "".join(f"{a.text}{a.headers}" for a in answers)
    assert "the local Hub has failed" in shown
    assert not [secret for secret in secrets if secret in shown]
