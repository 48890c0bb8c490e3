"""A server that means harm, answering the unmodified client: each attempt ends in one HubError, and writes nothing.

The message names the server's address, and says what was found and what was expected.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from publisher.border import limits
from publisher.border.limits import LIMITS
from publisher.errors import HubError, MissingFileError, NoRoomError, UnclearAnswerError
from publisher.hub import client as hub
from publisher.hub import commits, repository
from publisher.hub import door as hubdoor
from publisher.hub.client import Destination
from publisher.hub.local import LocalHub
from publisher.records.files import sha256_of

REPO = "team/adapter"
COMMIT = "c" * 40
TOKEN = "hf_secret_token"  # noqa: S105 - of no Hub
FILE = f"/{REPO}/resolve/{COMMIT}/config.json"
TREE = f"/api/models/{REPO}/tree/{COMMIT}"
MODEL = f"/api/models/{REPO}/revision/main"
SOUND = {"X-Repo-Commit": COMMIT, "ETag": '"' + "e" * 40 + '"'}

# huggingface_hub's LFS upload hands httpx2 a file in a way that httpx2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@dataclass
class Said:
    """One answer. A body may be pieces without end, which are then sent without a stated length."""

    body: Any = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    length: int | None = None


@dataclass
class Server:
    """A server on this machine that says whatever it was told to."""

    endpoint: str
    answers: dict[str, Said | Callable[[str], Said]] = field(default_factory=dict)
    heard: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path with query, Authorization

    @property
    def at(self) -> Destination:
        """As a destination, with the token."""
        return Destination(self.endpoint, TOKEN)

    def list(self, *entries: Any, **headers: str) -> None:
        """Let a listing hold these entries."""
        self.answers[TREE] = Said(json.dumps(entries).encode(), headers)

    @property
    def tokens_heard(self) -> set[str | None]:
        """Every Authorization that was sent here."""
        return {token for _, _, token in self.heard}


def _serve() -> tuple[Server, ThreadingHTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            made.heard.append((self.command, self.path, self.headers.get("Authorization")))
            said = made.answers.get(self.path.partition("?")[0], Said(status=404))
            said = said if isinstance(said, Said) else said(self.path)
            whole = isinstance(said.body, bytes)
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            if whole:
                self.send_header("Content-Length", str(len(said.body) if said.length is None else said.length))
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                for piece in () if self.command == "HEAD" else [said.body] if whole else said.body:
                    self.wfile.write(piece)
            except OSError:
                return  # the client has heard enough

        do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - the names that http.server calls

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    made = Server(f"http://127.0.0.1:{running.server_address[1]}")
    Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    return made, running


@pytest.fixture
def server() -> Iterator[Server]:
    made, running = _serve()
    yield made
    running.shutdown()
    running.server_close()
    close_session()


@pytest.fixture
def other() -> Iterator[Server]:
    """Another host, which must never hear of the token."""
    made, running = _serve()
    yield made
    running.shutdown()
    running.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "deep" / "er" / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return folder


def entry(**changes: Any) -> dict[str, Any]:
    """A file of a listing as the Hub lists it, but for the changes."""
    return {"type": "file", "path": "config.json", "size": 2, "oid": "a" * 40, **changes}


def lfs(**changes: Any) -> dict[str, Any]:
    return entry(lfs={"oid": "b" * 64, "size": 2, "pointerSize": 130, **changes})


def refusal(server: Server, ask: Callable[[], object]) -> HubError:
    """The one error that a question ends in."""
    with pytest.raises(HubError) as caught:
        ask()
    text = str(caught.value)
    assert server.endpoint in text
    assert "Expected" in text
    assert TOKEN not in text
    assert text.isprintable()
    assert len(text) < 2_000
    return caught.value


def written(tmp_path: Path) -> list[Path]:
    """Every file that has come to be, outside of the cache's own locks and tags."""
    return [path for path in tmp_path.rglob("*") if path.is_file() and ".locks" not in path.parts]


# --- listings -----------------------------------------------------------------------------------------------


def test_a_sound_listing_is_read(server: Server) -> None:
    server.list(entry(), lfs() | {"path": "a/b.safetensors"}, {"type": "directory", "path": "a", "oid": "a" * 40})
    assert [file.path for file in hub.list_files(REPO, COMMIT, at=server.at)] == ["a/b.safetensors", "config.json"]


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a\0b",
        "a\nb",
        "a\x1b[2Jb",
        "a\\..\\b",
        "",
        "x" * 100_000,
        ".git/config",
        "a//b",
        "\u2028",
    ],
)
def test_a_name_that_is_no_plain_path_is_refused(server: Server, path: str) -> None:
    server.list(entry(path=path))
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))


@pytest.mark.parametrize("path", [None, 3, ["x"], {"x": 1}, True])
def test_a_name_that_is_no_text_is_refused(server: Server, path: Any) -> None:
    server.list(entry(path=path))
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))


@pytest.mark.parametrize("size", [-1, "2", 1e300, 10**30, None, True, [2], LIMITS.file_bytes + 1])
def test_a_size_that_no_file_has_is_refused(server: Server, size: Any) -> None:
    server.list(entry(size=size))
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))


@pytest.mark.parametrize("digest", ["", "b" * 63, "B" * 64, "../" * 20, "b" * 64 + "\n", 7, None, ["b" * 64]])
def test_a_digest_that_is_not_hex_is_refused(server: Server, digest: Any) -> None:
    server.list(lfs(oid=digest) if digest is not None else entry(oid=None))
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"3",
        b"[3]",
        b'["x"]',
        b"[[]]",
        b'[{"type": "file"}]',
        b'[{"type": "file", "path": "a", "size": 1, "oid": "x", "lfs": 3}]',
        b"[" * 100_000,
        b'[{"a":' * 100_000,
        b"\xff\xfe",
        b"<html>not the Hub</html>",
    ],
)
def test_a_listing_of_another_shape_is_refused(server: Server, body: bytes) -> None:
    server.answers[TREE] = Said(body)
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))


def test_a_listing_of_too_many_files_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "LIMITS", limits.Limits(repository_files=50))
    server.list(*(entry(path=f"{number}") for number in range(51)))
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))
    server.list(*(entry(path=f"{number}") for number in range(50)))
    assert len(hub.list_files(REPO, COMMIT, at=server.at)) == 50


@pytest.mark.parametrize("body", [b"[]", json.dumps([entry()]).encode()])
def test_a_list_whose_next_page_is_itself_ends(server: Server, body: bytes) -> None:
    server.answers[TREE] = Said(body, {"Link": f'<{server.endpoint}{TREE}?cursor=1>; rel="next"'})
    assert "circle" in str(refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at)))
    assert len(server.heard) <= 3


def test_a_list_whose_pages_lead_in_a_wider_circle_ends(server: Server) -> None:
    def page(path: str) -> Said:
        following = "b" if path.endswith("=a") else "a"
        return Said(b"[]", {"Link": f'<{server.endpoint}{TREE}?cursor={following}>; rel="next"'})

    server.answers[TREE] = page
    assert "circle" in str(refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at)))


def test_a_list_of_ever_new_pages_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubdoor, "LIMITS", limits.Limits(answer_pages=20))
    server.answers[TREE] = lambda _: Said(
        b"[]", {"Link": f'<{server.endpoint}{TREE}?c={len(server.heard)}>; rel="next"'}
    )
    assert "ever more pages" in str(refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at)))
    assert len(server.heard) <= 22


def test_the_next_page_is_not_fetched_from_another_host(server: Server, other: Server) -> None:
    server.list(entry(), Link=f'<{other.endpoint}{TREE}>; rel="next"')
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))
    assert (server.tokens_heard, other.heard) == ({f"Bearer {TOKEN}"}, [])


def test_a_history_without_end_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubdoor, "LIMITS", limits.Limits(json_bytes=2**20))
    path = f"/api/models/{REPO}/commits/main"
    commits = [
        {"id": COMMIT, "title": "t" * 1000, "message": "", "date": "2026-01-01T00:00:00.000Z", "authors": []}
    ] * 50
    server.answers[path] = lambda _: Said(
        json.dumps(commits).encode(), {"Link": f'<{server.endpoint}{path}?c={len(server.heard)}>; rel="next"'}
    )
    refusal(server, lambda: hub.commits_since(REPO, "d" * 40, branch="main", at=server.at))
    assert len(server.heard) < 50


# --- answers ------------------------------------------------------------------------------------------------


def test_a_body_without_end_ends(server: Server) -> None:
    server.answers[TREE] = Said(iter(lambda: b" " * 2**20, b""))
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))


def test_a_body_that_is_announced_as_enormous_is_not_read(server: Server) -> None:
    server.answers[TREE] = Said(b"[", length=10**13)
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))


def test_a_body_that_would_unpack_to_anything_is_not_unpacked(server: Server) -> None:
    server.answers[TREE] = Said(b"\x1f\x8b", {"Content-Encoding": "gzip"})
    refusal(server, lambda: hub.list_files(REPO, COMMIT, at=server.at))


@pytest.mark.parametrize("sha", ["main", "c" * 39, "C" * 40, "../../x", 3, ["c" * 40], "c" * 40 + "\n"])
def test_a_revision_that_is_no_commit_id_is_refused(server: Server, sha: Any) -> None:
    server.answers[MODEL] = Said(json.dumps({"id": REPO, "sha": sha, "siblings": []}).encode())
    refusal(server, lambda: hub.resolve_revision(REPO, "main", at=server.at))


@pytest.mark.parametrize(
    "refs",
    [
        {"branches": [], "converts": [], "tags": [{"name": "v1", "ref": "refs/tags/v1", "targetCommit": "x"}]},
        {"branches": [], "converts": [], "tags": [{"name": "v\x1b[2J", "ref": "refs/tags/v", "targetCommit": COMMIT}]},
        {"branches": [], "converts": [], "tags": 3},
        {"tags": []},
        [],
    ],
)
def test_refs_that_are_none_are_refused(server: Server, refs: Any) -> None:
    server.answers[f"/api/models/{REPO}/refs"] = Said(json.dumps(refs).encode())
    refusal(server, lambda: hub.tags(REPO, at=server.at))


@pytest.mark.parametrize(
    "who", [[], {}, {"name": 3}, {"name": "a\x1b[31m"}, {"name": "a", "orgs": 3}, {"name": "a", "auth": 3}]
)
def test_an_account_that_is_none_is_refused(server: Server, who: Any) -> None:
    server.answers["/api/whoami-v2"] = Said(json.dumps(who).encode())
    refusal(server, lambda: hub.account(server.at))


def test_what_a_server_says_of_an_error_is_shown_harmless_and_short(server: Server) -> None:
    said = {"error": "\x1b[2J\x1b[31mall is well\u202e" + "x" * 100_000}
    server.answers[TREE] = Said(json.dumps(said).encode(), {"X-Error-Message": "all \x1b[2J well"}, status=400)
    with pytest.raises(HubError) as caught:
        hub.list_files(REPO, COMMIT, at=server.at)
    assert server.endpoint in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1_000


# --- downloads ----------------------------------------------------------------------------------------------


def test_a_sound_file_is_downloaded(server: Server, cache: Path) -> None:
    server.answers[FILE] = Said(b"{}", SOUND)
    for path in (
        hub.download(REPO, COMMIT, filename="config.json", at=server.at),
        hub.download_all(REPO, COMMIT, filenames=["config.json"], at=server.at) / "config.json",
    ):
        assert path.read_bytes() == b"{}"
        assert cache in path.parents


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\0b", "", "a\\b"])
def test_a_file_is_not_downloaded_by_a_name_that_leaves_the_cache(server: Server, tmp_path: Path, name: str) -> None:
    for ask in (
        lambda: hub.download(REPO, COMMIT, filename=name, at=server.at),
        lambda: hub.download_all(REPO, COMMIT, filenames=[name], at=server.at),
    ):
        refusal(server, ask)
    assert (server.heard, written(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": '"../../../../../evil"'},
        {"ETag": "/etc/evil"},
        {"ETag": '".."'},
        {"X-Linked-Etag": '"../../../../../evil"'},
        {"ETag": '"' + "e" * 5000 + '"'},
        {"X-Repo-Commit": "../../../../evil"},
        {"X-Repo-Commit": "/evil"},
        {"X-Repo-Commit": "d" * 40},
        {"X-Repo-Commit": "main"},
        {"X-Linked-Size": "-1"},
        {"X-Linked-Size": "9" * 400},
        {"X-Xet-Hash": "../x"},
    ],
)
def test_a_header_that_would_name_a_file_elsewhere_is_refused(
    server: Server, tmp_path: Path, headers: dict[str, str]
) -> None:
    server.answers[FILE] = Said(b"evil", SOUND | headers)
    for ask in (
        lambda: hub.download(REPO, COMMIT, filename="config.json", at=server.at),
        lambda: hub.download_all(REPO, COMMIT, filenames=["config.json"], at=server.at),
    ):
        refusal(server, ask)
    assert written(tmp_path) == []


def test_a_tag_that_names_no_file_may_be_any(server: Server) -> None:
    server.list(entry(), ETag='W/"3fa-a+b/c="')
    assert len(hub.list_files(REPO, COMMIT, at=server.at)) == 1


@pytest.mark.parametrize("commit", ["../../../../evil", "/evil"])
def test_what_is_absent_is_noted_inside_the_cache_alone(server: Server, tmp_path: Path, commit: str) -> None:
    server.answers[FILE] = Said(b"", {"X-Repo-Commit": commit, "X-Error-Code": "EntryNotFound"}, status=404)
    refusal(server, lambda: hub.download(REPO, COMMIT, filename="config.json", at=server.at))
    assert written(tmp_path) == []


def test_a_file_without_end_ends_at_the_size_that_was_stated(server: Server, tmp_path: Path) -> None:
    server.answers[FILE] = Said(iter(lambda: b"x" * 2**20, b""), SOUND | {"X-Linked-Size": "1000000"})
    refusal(server, lambda: hub.download(REPO, COMMIT, filename="config.json", at=server.at))
    assert all(path.name == "CACHEDIR.TAG" for path in written(tmp_path))


def test_a_file_without_end_and_without_a_size_ends(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubdoor, "LIMITS", limits.Limits(unsized_bytes=2**20))
    server.answers[FILE] = Said(iter(lambda: b"x" * 2**20, b""), SOUND)
    refusal(server, lambda: hub.download(REPO, COMMIT, filename="config.json", at=server.at))
    assert all(path.name == "CACHEDIR.TAG" for path in written(tmp_path))


def test_a_file_that_the_disk_cannot_hold_is_not_begun(server: Server, tmp_path: Path) -> None:
    server.answers[FILE] = Said(b"{}", SOUND | {"X-Linked-Size": str(LIMITS.file_bytes)})
    with pytest.raises(NoRoomError):
        hub.download(REPO, COMMIT, filename="config.json", at=server.at)
    assert {method for method, _, _ in server.heard} == {"HEAD"}
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://x/y",
        "javascript:x",
        "http://",
        "http://[x",
        "//",
        "http://a:b/c",
        "gopher://127.0.0.1/x",
    ],
)
def test_a_download_is_not_led_away_from_the_web(server: Server, tmp_path: Path, location: str) -> None:
    server.answers[FILE] = Said(b"", SOUND | {"Location": location}, status=302)
    with pytest.raises(HubError):
        hub.download(REPO, COMMIT, filename="config.json", at=server.at)
    assert all(path.name == "CACHEDIR.TAG" for path in written(tmp_path))


def test_storage_on_another_host_hears_nothing_of_the_token(server: Server, other: Server) -> None:
    elsewhere = other.endpoint.replace("127.0.0.1", "localhost")
    server.answers[FILE] = Said(b"", SOUND | {"Location": f"{elsewhere}/blob", "X-Linked-Size": "2"}, status=302)
    other.answers["/blob"] = Said(b"{}", {"ETag": '"x"'})
    assert hub.download(REPO, COMMIT, filename="config.json", at=server.at).read_bytes() == b"{}"
    assert other.tokens_heard == {None}


def test_an_answer_that_leads_to_another_host_takes_no_token_along(server: Server, other: Server) -> None:
    server.answers[MODEL] = Said(b"", {"Location": f"{other.endpoint}/x"}, status=307)
    other.answers["/x"] = Said(json.dumps({"id": REPO, "sha": COMMIT, "siblings": []}).encode())
    hub.resolve_revision(REPO, "main", at=server.at)
    assert other.tokens_heard == {None}


def test_redirects_in_a_circle_end(server: Server) -> None:
    server.answers[MODEL] = Said(b"", {"Location": MODEL}, status=302)
    with pytest.raises(HubError, match="TooManyRedirects"):
        hub.resolve_revision(REPO, "main", at=server.at)


def test_the_renewal_of_a_xet_token_is_not_asked_of_another_host(server: Server, other: Server) -> None:
    headers = {"X-Xet-Hash": "f" * 64, "Link": f'<{other.endpoint}/renew>; rel="xet-auth"', "X-Linked-Size": "2"}
    server.answers[FILE] = Said(b"{}", SOUND | headers)
    refusal(server, lambda: hub.download(REPO, COMMIT, filename="config.json", at=server.at))
    assert other.heard == []


def test_an_upload_is_not_confirmed_to_another_host(
    server: Server, other: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(os.urandom(1_100_000))
    monkeypatch.setattr(commits, "_LARGE", 1)
    oid = sha256_of(weights)
    actions = {"upload": {"href": f"{server.endpoint}/put"}, "verify": {"href": f"{other.endpoint}/verify"}}
    server.answers |= {
        f"/api/models/{REPO}/preupload/main": Said(
            json.dumps({"files": [{"path": "w.safetensors", "uploadMode": "lfs", "shouldIgnore": False}]}).encode()
        ),
        f"/{REPO}.git/info/lfs/objects/batch": Said(
            json.dumps({"objects": [{"oid": oid, "size": 1_100_000, "actions": actions}]}).encode()
        ),
        "/put": Said(b""),
    }
    changes = {"w.safetensors": weights}
    with pytest.raises(HubError, match="would be sent the token"):
        hub.commit(REPO, changes=changes, message="m", parent=COMMIT, pull_request=False, at=server.at)
    assert other.heard == []


@pytest.mark.parametrize("url", ["x\x1b[2J", 3, None, "y" * 10_000])
def test_a_commit_whose_answer_makes_no_sense_may_have_landed(server: Server, tmp_path: Path, url: Any) -> None:
    (tmp_path / "a").write_text("a")
    server.answers |= {
        f"/api/models/{REPO}/preupload/main": Said(
            json.dumps({"files": [{"path": "a", "uploadMode": "regular", "shouldIgnore": False}]}).encode()
        ),
        f"/api/models/{REPO}/commit/main": Said(json.dumps({"commitUrl": url, "commitOid": COMMIT}).encode()),
    }
    changes = {"a": tmp_path / "a"}
    with pytest.raises(UnclearAnswerError):
        hub.commit(REPO, changes=changes, message="m", parent=COMMIT, pull_request=False, at=server.at)


# --- offline ------------------------------------------------------------------------------------------------


def test_offline_mode_keeps_requests_at_home_except_those_to_the_embedded_hub(
    server: Server, other: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, other.endpoint)
    (tmp_path / "a").write_text("a")
    with LocalHub(tmp_path / "hub") as local, hub.embedded(local.endpoint, local.token) as at:
        hub.create_repository(REPO, at=at)
        head = hub.resolve_revision(REPO, "main", at=at)
        changes = {"a": tmp_path / "a"}
        made = hub.commit(REPO, changes=changes, message="m", parent=head, pull_request=False, at=at)
        assert hub.download(REPO, made.id, filename="a", at=at).read_text() == "a"
        with pytest.raises(HubError, match="OfflineModeIsEnabled"):
            hub.resolve_revision(REPO, "main", at=server.at)
        with pytest.raises(HubError, match="OfflineModeIsEnabled"):
            hub.resolve_revision(REPO, "main")
    assert (server.heard, other.heard) == ([], [])
    with pytest.raises(HubError, match="OfflineModeIsEnabled"):
        hub.resolve_revision(REPO, "main", at=at)
    assert "NO_PROXY" not in os.environ or "localhost" not in os.environ["NO_PROXY"]


def test_a_missing_file_is_told_as_before(server: Server) -> None:
    missing = Said(b"", {"X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"}, status=404)
    server.answers[FILE] = missing
    with pytest.raises(MissingFileError):
        hub.download(REPO, COMMIT, filename="config.json", at=server.at)
