"""Trusted publishing: from a CI job's ID token to a token of one repository."""

import time
from collections.abc import Callable
from subprocess import CompletedProcess

import jwt
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub._oidc import exchange_oidc_token, oidc_login
from huggingface_hub.errors import BadRequestError, HfHubHTTPError

from publisher.hub.local import LocalHub

Client = Callable[..., CompletedProcess[str]]
CLAIMS = {"repository": "team/code", "workflow": "release.yml", "ref": "refs/tags/v1.0"}
WANTED = {"repository": "team/code", "workflow": "release.yml"}
COMMIT = """
from huggingface_hub import CommitOperationAdd, HfApi
HfApi().create_commit("team/adapter", [CommitOperationAdd("a.txt", b"a")], commit_message="from the job")
"""


def add() -> list[CommitOperationAdd]:
    """A small file; the client takes each operation once only."""
    return [CommitOperationAdd("a.txt", b"a")]


@pytest.fixture
def trusting(hub: LocalHub, repo: str) -> str:
    """A repository that trusts one workflow of one code repository."""
    hub.trusted_publishers.trust(repo, WANTED)
    return repo


def exchanged(hub: LocalHub, repo: str, id_token: str) -> HfApi:
    answer = exchange_oidc_token(subject_token=id_token, resource=repo, endpoint=hub.endpoint)
    return HfApi(endpoint=hub.endpoint, token=answer["access_token"])


def test_a_job_publishes_without_any_stored_token(hub: LocalHub, trusting: str, client: Client) -> None:
    done = client(COMMIT, HF_OIDC_RESOURCE=trusting, **hub.github.job(CLAIMS))
    assert done.returncode == 0, done.stderr
    assert [commit.title for commit in hub.repository(trusting).commits()] == ["from the job", "initial commit"]


@pytest.mark.parametrize("claims", [{**CLAIMS, "repository": "someone/else"}, {**CLAIMS, "workflow": "ci"}, {}])
def test_a_job_with_other_claims_is_refused(
    hub: LocalHub, trusting: str, monkeypatch: pytest.MonkeyPatch, claims: dict[str, str]
) -> None:
    for name, value in hub.github.job(claims).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadRequestError, match="no trusted publisher") as caught:
        oidc_login(resource=trusting, endpoint=hub.endpoint)
    assert caught.value.response.json()["error"] == "invalid_grant"


def test_a_repository_that_trusts_nobody_refuses_every_job(hub: LocalHub, repo: str) -> None:
    with pytest.raises(BadRequestError, match="no trusted publisher"):
        exchanged(hub, repo, hub.github.mint(CLAIMS, hub.endpoint))


def test_trusting_a_job_without_claims_is_refused(hub: LocalHub, repo: str) -> None:
    with pytest.raises(ValueError, match="everyone"):
        hub.trusted_publishers.trust(repo, {})


def test_an_id_token_for_another_audience_is_refused(hub: LocalHub, trusting: str) -> None:
    with pytest.raises(BadRequestError, match="InvalidAudienceError"):
        exchanged(hub, trusting, hub.github.mint(CLAIMS, "https://huggingface.co"))


def test_an_id_token_that_someone_else_signed_is_refused(hub: LocalHub, trusting: str) -> None:
    genuine = jwt.decode(hub.github.mint(CLAIMS, hub.endpoint), options={"verify_signature": False})
    with pytest.raises(BadRequestError, match="InvalidSignatureError"):
        exchanged(hub, trusting, jwt.encode(genuine, "k" * 32, "HS256"))


def test_an_id_token_that_has_expired_is_refused(hub: LocalHub, trusting: str) -> None:
    hub.github.lifetime = -1
    with pytest.raises(BadRequestError, match="ExpiredSignatureError"):
        exchanged(hub, trusting, hub.github.mint(CLAIMS, hub.endpoint))


def test_an_exchanged_token_that_has_expired_is_refused(hub: LocalHub, trusting: str) -> None:
    hub.trusted_publishers.lifetime = 1
    api = exchanged(hub, trusting, hub.github.mint(CLAIMS, hub.endpoint))
    time.sleep(1.1)
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit(trusting, add(), commit_message="too late")
    assert caught.value.response.status_code == 401
    assert len(hub.repository(trusting).commits()) == 1


def test_an_exchanged_token_writes_to_its_repository_only(hub: LocalHub, api: HfApi, trusting: str) -> None:
    api.create_repo("team/other")
    job = exchanged(hub, trusting, hub.github.mint(CLAIMS, hub.endpoint))
    job.create_commit(trusting, add(), commit_message="mine")
    attempts: list[Callable[[], object]] = [
        lambda: job.create_commit("team/other", add(), commit_message="not mine"),
        lambda: job.create_repo("team/new"),
    ]
    for attempt in attempts:
        with pytest.raises(HfHubHTTPError) as caught:
            attempt()
        assert caught.value.response.status_code == 403
    assert len(hub.repository(trusting).commits()) == 2
    assert len(hub.repositories()) == 2


def test_an_unknown_job_gets_no_id_token(hub: LocalHub, trusting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = hub.github.job(CLAIMS) | {"ACTIONS_ID_TOKEN_REQUEST_TOKEN": "unknown"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HfHubHTTPError) as caught:
        oidc_login(resource=trusting, endpoint=hub.endpoint)
    assert caught.value.response.status_code == 401
