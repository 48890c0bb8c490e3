"""The local Hub against callers who mean harm: programs without a token, web pages, and malformed requests of any kind.

Most attempts speak to the application in process, with requests that no client would send.
"""

import asyncio
import base64
import hashlib
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from publisher.border.limits import LIMITS
from publisher.hub.local import LocalHub, Role
from publisher.hub.local.app import routes
from publisher.hub.local.routes import repos
from publisher.hub.local.server import environment_lines

REPO = "team/adapter"
WRITE = "hf_write"
API = f"/api/models/{REPO}"
OID = "d" * 64
FENCE = "---\n"


@dataclass
class Answer:
    """What one request got, and how many bytes of its body the application took in."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    taken: int = 0

    @property
    def json(self) -> Any:
        """The body, which is JSON."""
        return json.loads(self.body)


@dataclass
class Caller:
    """Speaks to a local Hub in process. A body may be pieces without end; they are made as they are taken."""

    hub: LocalHub

    def ask(
        self,
        method: str,
        target: str,
        body: bytes | Iterator[bytes] = b"",
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request to the right host; a header without a value is left out."""
        fields = {"host": self.hub.endpoint.removeprefix("http://")}
        fields |= {"authorization": f"Bearer {token}"} if token else {}
        fields |= {name.lower(): value for name, value in (headers or {}).items()}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items() if value]
        return self.raw(method, target, body, headers=raw)

    def raw(
        self, method: str, target: str, body: bytes | Iterator[bytes], *, headers: list[tuple[bytes, bytes]]
    ) -> Answer:
        """Send one request with these headers alone."""
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("latin-1"),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", urlsplit(self.hub.endpoint).port),
            "state": {},
        }
        pieces = iter([body]) if isinstance(body, bytes) else body
        answer = Answer()

        async def receive() -> dict[str, Any]:
            piece = next(pieces, None)
            answer.taken += len(piece or b"")
            return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            answer.body += message.get("body", b"")

        asyncio.run(self.hub.app(scope, receive, send))
        return answer

    def write(self, method: str, target: str, body: Any) -> Answer:
        """With the write token; a body that is not bytes is sent as JSON."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask(method, target, sent, token=self.hub.token)

    def commit(self, path: Any, content: Any = "MQ==") -> Answer:
        """Commit one file."""
        lines = (
            {"key": "header", "value": {"summary": "x"}},
            {"key": "file", "value": {"path": path, "content": content}},
        )
        return self.write("POST", f"{API}/commit/main", "\n".join(json.dumps(line) for line in lines).encode())

    def paths(self) -> list[str]:
        """What the repository holds."""
        return list(self.hub.repository(REPO).files())

    def address_for(self, content: bytes, **announced: Any) -> str:
        """Where the batch lets this content be uploaded to."""
        wanted = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), **announced}
        answer = self.write("POST", f"/{REPO}.git/info/lfs/objects/batch", {"operation": "upload", "objects": [wanted]})
        address = str(answer.json["objects"][0]["actions"]["upload"]["href"])
        return address.partition(str(urlsplit(self.hub.endpoint).port))[2]

    def stored(self, root: Path) -> list[str]:
        """What is kept of uploads below this folder."""
        return [file.name for file in (root / "lfs").iterdir()]


def _caller(root: Path, **options: Any) -> Caller:
    caller = Caller(LocalHub(root, {WRITE: Role.WRITE, "hf_read": Role.READ}, **options))
    assert caller.write("POST", "/api/repos/create", {"name": "adapter", "organization": "team"}).status == 200
    return caller


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    made = _caller(tmp_path)
    yield made
    assert made.hub.repository(REPO).fsck() == ()
    made.hub.close()


def endless() -> Iterator[bytes]:
    """A body of 300 MB in pieces."""
    return (b"a" * 2**20 for _ in range(300))


# --- bounds before a token is seen --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", [f"/lfs/{OID}", f"/lfs/{OID}/parts/1", f"/lfs/{OID}?signature=x", f"/lfs/{OID}?signature="]
)
@pytest.mark.parametrize("length", ["300000000", ""])
def test_an_upload_without_a_signed_address_is_refused_before_a_byte_of_it_is_read(
    caller: Caller, tmp_path: Path, target: str, length: str
) -> None:
    answer = caller.ask("PUT", target, endless(), headers={"content-length": length})
    assert (answer.status, answer.taken, caller.stored(tmp_path)) == (401, 0, [])


@pytest.mark.parametrize("number", ["0", "-1", "9" * 300, "1.5", "%00", "1e3", "\u0661".encode().decode("latin-1")])
def test_a_part_whose_number_is_no_small_one_is_refused(caller: Caller, tmp_path: Path, number: str) -> None:
    answer = caller.ask("PUT", f"/lfs/{OID}/parts/{number}", endless(), token=WRITE)
    assert (answer.status // 100, answer.taken, caller.stored(tmp_path)) == (4, 0, [])


@pytest.mark.parametrize("oid", ["D" * 64, "d" * 63, "..%2f..%2fx", "%00" * 64, "d" * 64 + "%0a"])
def test_an_object_is_named_by_64_hex_digits_alone(caller: Caller, tmp_path: Path, oid: str) -> None:
    for method in ("PUT", "GET"):
        assert caller.ask(method, f"/lfs/{oid}", endless(), token=WRITE).status in {400, 404}
    assert caller.stored(tmp_path) == []


def test_a_signed_address_takes_its_own_content_and_nothing_larger(caller: Caller, tmp_path: Path) -> None:
    target = caller.address_for(b"right")
    larger = caller.ask("PUT", target, endless())
    assert (larger.status, larger.taken) == (413, 2**20)
    told = caller.ask("PUT", target, endless(), headers={"content-length": "300000000"})
    assert (told.status, told.taken) == (413, 0)
    assert caller.ask("PUT", target, b"wrong").status == 400
    assert caller.stored(tmp_path) == []
    assert caller.ask("PUT", target, b"right").status == 200
    assert caller.stored(tmp_path) == [hashlib.sha256(b"right").hexdigest()]


def test_an_address_that_was_signed_for_one_upload_is_good_for_no_other(caller: Caller, tmp_path: Path) -> None:
    signature = caller.address_for(b"right").partition("?")[2]
    for target in (f"/lfs/{OID}", f"/lfs/{hashlib.sha256(b'right').hexdigest()}/parts/1"):
        assert caller.ask("PUT", f"{target}?{signature}", b"right").status == 400
    assert caller.ask("POST", f"/lfs/{hashlib.sha256(b'right').hexdigest()}/complete?{signature}").status == 400
    assert caller.stored(tmp_path) == []


def test_parts_that_make_up_something_else_are_gone_with_the_refusal(tmp_path: Path) -> None:
    caller = _caller(tmp_path, part_size=4)
    wanted = {"oid": hashlib.sha256(b"12345678").hexdigest(), "size": 8}
    offer = caller.write("POST", f"/{REPO}.git/info/lfs/objects/batch", {"operation": "upload", "objects": [wanted]})
    upload = offer.json["objects"][0]["actions"]["upload"]
    first, second, whole = (
        "/lfs/" + address.partition("/lfs/")[2]
        for address in (upload["header"]["1"], upload["header"]["2"], upload["href"])
    )
    tags = [caller.ask("PUT", target, b"1234").headers["etag"] for target in (first, second)]
    assert caller.ask("PUT", first, endless()).status == 413
    parts = [{"partNumber": place + 1, "etag": tag} for place, tag in enumerate(tags)]
    malformed: list[Any] = [
        {},
        {"partNumber": "1", "etag": "x"},
        {"partNumber": True},
        3,
        {"partNumber": 1, "etag": None},
    ]
    for part in malformed:
        assert caller.ask("POST", whole, json.dumps({"parts": [part]}).encode()).status == 400
    assert caller.ask("POST", whole, json.dumps({"parts": parts[:1]}).encode()).status == 400
    assert len(caller.stored(tmp_path)) == 2
    assert caller.ask("POST", whole, json.dumps({"parts": parts}).encode()).status == 400
    assert caller.stored(tmp_path) == []
    caller.hub.close()


@pytest.mark.parametrize("size", [-1, "1", 10**30, 1.5, True, None, [1]])
def test_an_upload_of_an_impossible_size_is_not_offered(caller: Caller, size: Any) -> None:
    wanted = {"operation": "upload", "objects": [{"oid": OID, "size": size}]}
    assert caller.write("POST", f"/{REPO}.git/info/lfs/objects/batch", wanted).status == 400


def test_an_upload_that_the_disk_cannot_hold_is_not_offered(caller: Caller) -> None:
    wanted = {"operation": "upload", "objects": [{"oid": OID, "size": LIMITS.file_bytes}]}
    assert caller.write("POST", f"/{REPO}.git/info/lfs/objects/batch", wanted).status == 413


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/api/validate-yaml"),
        ("POST", "/oauth/token"),
        ("POST", f"{API}/paths-info/main"),
    ],
)
def test_what_anyone_may_ask_is_bounded_with_and_without_a_stated_length(
    caller: Caller, method: str, target: str
) -> None:
    told = caller.ask(method, target, endless(), headers={"content-length": "300000000"})
    assert (told.status, told.taken) == (413, 0)
    untold = caller.ask(method, target, endless())
    assert untold.status == 413
    assert untold.taken <= LIMITS.request_bytes + 2**20


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/api/repos/create"),
        ("DELETE", "/api/repos/delete"),
        ("POST", "/lfs/verify"),
        ("POST", f"{API}/commit/main"),
        ("POST", f"{API}/preupload/main"),
        ("POST", f"/{REPO}.git/info/lfs/objects/batch"),
        ("POST", f"{API}/tag/main"),
        ("POST", f"{API}/branch/dev"),
        ("POST", f"{API}/discussions"),
        ("POST", f"/xet/x/v1/xorbs/default/{OID}"),
        ("POST", "/xet/x/v1/shards"),
    ],
)
def test_what_takes_a_token_reads_nothing_of_a_body_without_one(caller: Caller, method: str, target: str) -> None:
    for token in (None, "hf_unknown", "hf_jwt_x.y.z"):
        answer = caller.ask(method, target, endless(), token=token)
        assert (answer.status, answer.taken) == (401, 0)


@pytest.mark.parametrize("length", ["-1", "abc", "1e9", "\u0663".encode().decode("latin-1"), "9" * 100])
def test_a_length_that_is_no_number_is_refused_unread(caller: Caller, length: str) -> None:
    answer = caller.ask("POST", "/api/validate-yaml", endless(), headers={"content-length": length})
    assert (answer.status in {400, 413}, answer.taken) == (True, 0)


# --- what a body says ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"name": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"name": "\\ud800"}',
        b'{"name": 1' + b"0" * 5000 + b"}",
        b"\xff\xfe",
        b"null",
        b'{"name": {"a": 1}}',
        b'{"name": "adapter", "organization": ["team"]}',
        b'{"name": "a/../../x"}',
        b'{"name": "x\\u0000"}',
        b'{"name": "x", "type": ["model"]}',
    ],
)
def test_a_malformed_description_of_a_repository_is_refused(caller: Caller, body: bytes) -> None:
    assert caller.write("POST", "/api/repos/create", body).status == 400
    assert len(caller.hub.repositories()) == 1


@pytest.mark.parametrize(
    "path",
    [
        "x\0y",
        "x\ny",
        "x\x7f",
        "../x",
        "a/../x",
        "/etc/x",
        "a\\b",
        "",
        "/",
        "a//b",
        "./a",
        ".git/config",
        "a/.GIT/x",
        "a/" * 300 + "x",
        "y" * 300,
        "\u2028",
    ],
)
def test_a_path_that_no_repository_should_hold_is_refused(caller: Caller, path: str) -> None:
    assert caller.commit(path).status == 422
    assert caller.paths() == [".gitattributes"]


@pytest.mark.parametrize("content", ["!!!", "MQ", "MQ==\n", "M Q==", "====", "\u0645", None, 3, ["MQ=="]])
def test_content_that_is_not_strictly_base64_is_refused(caller: Caller, content: Any) -> None:
    assert caller.commit("z", content).status == 400
    assert caller.paths() == [".gitattributes"]


def test_a_file_that_belongs_into_lfs_is_not_taken_into_git(caller: Caller) -> None:
    assert caller.commit("z", base64.b64encode(bytes(10_000_001)).decode()).status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]\n",
        b'{"key": "header"}',
        b'{"key": "header", "value": {}}',
        b'{"key": "header", "value": {"summary": 3}}',
        b'{"key": "header", "value": {"summary": "a\\u0000b"}}',
        b'{"key": "header", "value": {"summary": "a", "description": {}}}',
        b'{"key": "header", "value": {"summary": "a", "parentCommit": 7}}',
        b'{"key": "header", "value": {"summary": "a", "parentCommit": "main"}}',
        b'{"key": "header", "value": {"summary": "a"}}\n{"key": "file"}',
        b'{"key": "header", "value": {"summary": "a"}}\n{"key": ["file"], "value": {"path": "x"}}',
        b'{"key": "header", "value": {"summary": "a"}}\n' + b'{"key":' * 100_000,
        b'{"key": "header", "value": {"summary": "a"}}\n{"key": "lfsFile", "value": {"path": "x", "oid": "../x"}}',
    ],
)
def test_a_commit_of_malformed_lines_is_refused(caller: Caller, body: bytes) -> None:
    assert caller.write("POST", f"{API}/commit/main", body).status == 400
    assert len(caller.hub.repository(REPO).commits()) == 1


@pytest.mark.parametrize(
    "query", ["cursor=x", "cursor=-1", "limit=abc", "limit=1e3", "limit=", "cursor=" + "9" * 5000, "limit=%00"]
)
def test_a_malformed_page_of_a_list_is_refused(caller: Caller, query: str) -> None:
    for target in (f"{API}/tree/main", f"{API}/commits/main"):
        assert caller.ask("GET", f"{target}?{query}").status == 400


@pytest.mark.parametrize("query", ["recursive=maybe", "expand=x", "limit=0", "cursor=999999", "blobs=x", "%ff=%ff"])
def test_a_parameter_without_meaning_changes_nothing(caller: Caller, query: str) -> None:
    assert caller.ask("GET", f"{API}/tree/main?{query}").status == 200


@pytest.mark.parametrize(
    "metadata",
    [
        "a: [" + "{b: c}," * 60_000 + "]",
        "[" * 10_000,
        "a: " + "[" * 100 + "]" * 100,
        "a: &a [x]\nb: [*a, *a]",
        "a: 1" + "0" * 64,
        "a: .nan",
        "a: !!binary aGk=",
        "a: !!set {x, y}",
        "? [a, b]\n: c",
        "a: !!python/object/apply:os.system [id]",
    ],
)
def test_metadata_of_a_card_that_is_too_much_ends_at_once(caller: Caller, metadata: str) -> None:
    card = f"{FENCE}{metadata}\n{FENCE}"
    assert caller.ask("POST", "/api/validate-yaml", json.dumps({"content": card}).encode()).status == 400
    if len(card) < 100_000:
        assert caller.commit("README.md", base64.b64encode(card.encode()).decode()).status == 200
        assert caller.ask("GET", API).json["cardData"] is None


@pytest.mark.parametrize("tags", ["5", "{a: b}", "[1, [x], null]", "text"])
def test_tags_of_a_card_that_are_no_list_of_words_are_left_out(caller: Caller, tags: str) -> None:
    card = f"{FENCE}tags: {tags}\n{FENCE}"
    assert caller.commit("README.md", base64.b64encode(card.encode()).decode()).status == 200
    assert caller.ask("GET", API).json["tags"] == ["local Hub"]


# --- who may speak ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost.evil.example:{port}",
        "127.0.0.1:{port}.evil.example",
        "0.0.0.0:{port}",
        "127.0.0.1:{port} evil",
        "",
    ],
)
def test_a_name_that_merely_leads_to_this_machine_is_refused(caller: Caller, host: str) -> None:
    named = host.format(port=urlsplit(caller.hub.endpoint).port)
    for method, target in (("GET", API), ("POST", "/api/validate-yaml"), ("GET", "/none")):
        assert caller.ask(method, target, headers={"host": named}, token=WRITE).status == 421


def test_two_names_of_the_host_are_refused(caller: Caller) -> None:
    right = caller.hub.endpoint.removeprefix("http://").encode()
    for names in ([right, b"evil.example"], [b"evil.example", right], [right, right]):
        assert caller.raw("GET", API, b"", headers=[(b"host", name) for name in names]).status == 421


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]", "LOCALHOST"])
def test_the_names_of_this_machine_are_answered(caller: Caller, name: str) -> None:
    host = f"{name}:{urlsplit(caller.hub.endpoint).port}"
    assert caller.ask("GET", API, headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", "http://localhost", "file://"],
)
def test_a_page_of_another_site_changes_nothing(caller: Caller, origin: str) -> None:
    headers = {"origin": origin.format(port=urlsplit(caller.hub.endpoint).port)}
    for method, target in (
        ("POST", f"{API}/tag/main"),
        ("PUT", f"/lfs/{OID}"),
        ("DELETE", "/api/repos/delete"),
        ("PATCH", API),
    ):
        answer = caller.ask(method, target, endless(), headers=headers, token=WRITE)
        assert (answer.status, answer.taken) == (403, 0)
    own = {"origin": caller.hub.endpoint}
    assert caller.ask("POST", f"{API}/branch/dev", b"{}", headers=own, token=WRITE).status == 200


def test_it_listens_on_this_machine_alone(tmp_path: Path) -> None:
    hub = LocalHub(tmp_path)
    assert hub.endpoint.startswith("http://127.0.0.1:")
    assert hub.address[0] == "127.0.0.1"
    assert environment_lines(hub.endpoint, tmp_path)[0].endswith(hub.endpoint)
    hub.close()


# --- one request never holds up the others ------------------------------------------------------------------


def test_a_request_is_answered_while_another_one_is_at_heavy_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered = Event(), Event()

    def heavy(_: str) -> dict[str, Any]:
        begun.set()
        assert answered.wait(60)
        return {}

    monkeypatch.setattr(repos, "card_metadata", heavy)
    with LocalHub(tmp_path) as hub:
        slow = Thread(target=_spoken, args=(hub, "POST /api/validate-yaml", b'{"content": ""}'))
        slow.start()
        assert begun.wait(60)
        assert b" 401 " in _spoken(hub, "GET /api/whoami-v2", b"")
        answered.set()
        slow.join()
        assert hub.requests == ("GET /api/whoami-v2 401", "POST /api/validate-yaml 200")


def _spoken(hub: LocalHub, line: str, body: bytes) -> bytes:
    """One request over a real connection."""
    host = hub.endpoint.removeprefix("http://")
    with socket.create_connection(hub.address, timeout=60) as connection:
        head = f"{line} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


# --- anything at all ----------------------------------------------------------------------------------------

_SEGMENTS = st.one_of(
    st.sampled_from(
        [
            "main",
            "team",
            "adapter",
            "models",
            "README.md",
            ".gitattributes",
            OID,
            "1",
            "0",
            "..",
            ".",
            "%00",
            "refs%2Fpr%2F1",
            "refs%2fheads%2fmain",
            "HEAD",
            "a" * 3000,
            "%2e%2e",
            "%ed%a0%80",
            "9" * 5000,
            "v1",
            "x%0ay",
            "-",
            "@%7b0%7d",
            "*",
            "~1",
        ]
    ),
    st.text(max_size=8).map(lambda text: quote(text.encode(errors="replace"), safe="")),
)
_NAMES = st.sampled_from(
    [
        "path",
        "paths",
        "files",
        "sample",
        "size",
        "oid",
        "objects",
        "operation",
        "parts",
        "etag",
        "partNumber",
        "name",
        "organization",
        "type",
        "visibility",
        "content",
        "tag",
        "message",
        "title",
        "pullRequest",
        "startingPoint",
        "key",
        "value",
        "summary",
        "description",
        "parentCommit",
        "grant_type",
        "resource",
        "subject_token",
        "subject_token_type",
    ]
)
_WORDS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "upload",
            "header",
            "file",
            "lfsFile",
            "deletedFile",
            "deletedFolder",
            "model",
            OID,
            "main",
            "MQ==",
            "a/b",
            "../x",
            "\ud800",
            "README.md",
            "---\na: 1\n---\n",
            "urn:ietf:params:oauth:grant-type:token-exchange",
            "urn:ietf:params:oauth:token-type:id_token",
            "0" * 40,
        ]
    ),
)
_VALUES = st.recursive(
    _WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=5), max_leaves=12
)
_OBJECTS = st.dictionaries(_NAMES, _VALUES, max_size=8)
_LINES = st.lists(
    st.fixed_dictionaries({"key": _WORDS, "value": _OBJECTS}) | st.just({"key": "header", "value": {"summary": "x"}}),
    max_size=4,
)
_BODIES = st.one_of(
    st.binary(max_size=200),
    _VALUES.map(lambda value: json.dumps(value).encode()),
    _OBJECTS.map(lambda value: json.dumps(value).encode()),
    _LINES.map(lambda lines: "\n".join(json.dumps(line) for line in lines).encode()),
    st.text(max_size=40).map(lambda text: json.dumps({"content": f"---\n{text}\n---\n"}).encode()),
    st.just(b"paths=%ff&paths=a&expand=\xff"),
)
_HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "range",
            "if-range",
            "content-length",
            "content-type",
            "accept",
            "authorization",
            "if-none-match",
            "transfer-encoding",
            "x-forwarded-for",
        ]
    ),
    st.sampled_from(
        [
            "bytes=0-",
            "bytes=5-1",
            "bytes=-1",
            "bytes=" + "9" * 5000 + "-",
            "bytes=0-0,1-1",
            "0",
            "7",
            "-1",
            "abc",
            "Bearer hf_write",
            "Bearer hf_read",
            "Bearer \xff",
            "Bearer hf_jwt_a.b.c",
            "multipart/form-data; boundary=x",
            "\xff",
        ]
    ),
    max_size=3,
)
_QUERIES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "cursor",
                "limit",
                "recursive",
                "expand",
                "create_pr",
                "blobs",
                "audience",
                "signature",
                "include_prs",
                "x%00",
            ]
        ),
        st.sampled_from(["1", "0", "true", "x", "", "%ff", "%00", "a.b.c", "9" * 400]),
    ).map("=".join),
    max_size=3,
).map("&".join)
_METHODS = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "", "get", "X\xff"])


_FUZZING = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
_PUT = {"key": "file", "value": {"path": "a.txt", "content": "MQ==", "encoding": "base64"}}
_BATCH = {"operation": "upload", "objects": [{"oid": OID, "size": 5}]}
_EXCHANGE = {
    "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
    "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
    "resource": REPO,
    "subject_token": "a.b.c",
}
_MEANT: list[tuple[str, str, Any]] = [  # what the client sends, before something of it is bent
    ("POST", "/api/repos/create", {"name": "other", "organization": "team", "type": "model", "visibility": "public"}),
    ("DELETE", "/api/repos/delete", {"name": "other", "organization": "team", "type": "model"}),
    ("POST", "/api/validate-yaml", {"content": "---\na: [1, {b: c}]\n---\n", "repoType": "model"}),
    ("POST", "/oauth/token", _EXCHANGE),
    ("POST", f"{API}/preupload/main", {"files": [{"path": "a.txt", "sample": "MQ==", "size": 1}]}),
    ("POST", f"{API}/commit/main", [{"key": "header", "value": {"summary": "s", "description": "d"}}, _PUT]),
    ("POST", f"{API}/commit/main?create_pr=1", [{"key": "header", "value": {"summary": "s"}}, _PUT]),
    ("POST", f"{API}/commit/refs%2Fpr%2F1", [{"key": "header", "value": {"summary": "s"}}, _PUT]),
    ("POST", f"{API}/tag/main", {"tag": "v1", "message": "m"}),
    ("POST", f"{API}/branch/dev", {"startingPoint": "main"}),
    ("POST", f"{API}/discussions", {"title": "t", "pullRequest": True}),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", _BATCH),
    ("POST", "/lfs/verify", {"oid": OID, "size": 5}),
    ("PUT", f"/lfs/{OID}?signature=a.b.c", {}),
    ("POST", f"/lfs/{OID}/complete?signature=a.b.c", {"parts": [{"partNumber": 1, "etag": "x"}]}),
    ("DELETE", f"{API}/tag/v1", {}),
    ("DELETE", f"{API}/branch/dev", {}),
    ("GET", f"{API}/tree/main/a?recursive=true&cursor=0&limit=5", {}),
    ("GET", f"{API}/commits/main?limit=1", {}),
    ("GET", f"{API}/discussions/1?diff=1", {}),
    ("GET", f"{API}/refs?include_prs=1", {}),
    ("GET", f"{API}/revision/main?blobs=true", {}),
    ("GET", f"/{REPO}/resolve/main/.gitattributes", {}),
    ("GET", f"{API}/xet-read-token/main", {}),
    ("GET", f"/xet/x/v1/reconstructions/{OID}", {}),
    ("GET", "/github/id-token?audience=x", {}),
]


@st.composite
def _bent(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A request as the client makes it, with one value of its body or one part of its address replaced."""
    method, target, meant = draw(st.sampled_from(_MEANT))
    body = json.loads(json.dumps(meant))
    places = list(_places(body))
    bent: int = draw(st.integers(0, 3))
    if places and bent:
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        if draw(st.integers(0, 5)):
            holder[key] = draw(_VALUES)
        else:
            del holder[key]
    else:
        path, _, query = target.partition("?")
        parts = path.split("/")
        parts[draw(st.integers(1, len(parts) - 1))] = draw(_SEGMENTS)
        target = f"{'/'.join(parts)}?{query}"
    lines = body if isinstance(body, list) else [body]
    return method, target, "\n".join(json.dumps(line) for line in lines).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON value that could hold something else."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


@st.composite
def _wild(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """Any method and body, at an address that is made after one of the local Hub's own."""
    route = draw(st.sampled_from(routes()))
    target = ""
    for part in route.path.split("/")[1:]:
        known = {"kind": "models", "namespace": "team", "name": "adapter", "revision": "main", "path": ".gitattributes"}
        name = part.strip("{}").partition(":")[0].partition("}")[0]
        usual = part.replace("{name}", "adapter") if "}." in part else known.get(name, part)
        target += "/" + (usual if "{" not in usual and draw(st.integers(0, 9)) else draw(_SEGMENTS))
    right = min(route.methods or {"GET"})
    method = draw(_METHODS) if draw(st.integers(0, 4)) == 0 else right
    return method, f"{target}?{draw(_QUERIES)}", draw(_BODIES)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    made = _caller(tmp_path_factory.mktemp("fuzzed"))
    yield made
    made.hub.close()


def _ready(caller: Caller) -> None:
    """Make the repository again, if a request was right enough to delete it."""
    if not any(found.resource == f"models/{REPO}" for found in caller.hub.repositories()):
        caller.write("POST", "/api/repos/create", {"name": "adapter", "organization": "team"})


@_FUZZING
@given(asked=_bent())
def test_a_request_with_one_thing_bent_is_no_fault_of_the_server(fuzzed: Caller, asked: tuple[str, str, bytes]) -> None:
    _ready(fuzzed)
    method, target, body = asked
    assert 200 <= fuzzed.ask(method, target, body, token=WRITE).status < 500


@_FUZZING
@given(asked=_wild() | _bent(), headers=_HEADERS, token=st.sampled_from([WRITE, "hf_read", None]))
def test_no_request_at_all_is_answered_with_a_fault_of_the_server(
    fuzzed: Caller, asked: tuple[str, str, bytes], headers: dict[str, str], token: str | None
) -> None:
    _ready(fuzzed)
    method, target, body = asked
    assert 200 <= fuzzed.ask(method, target, body, token=token, headers=headers).status < 500
