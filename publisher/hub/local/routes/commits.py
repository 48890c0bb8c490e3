"""Commits: what is to be uploaded how, the commit itself, and the history."""

import base64
import re
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from publisher.border.limits import LIMITS
from publisher.hub.local.auth import USER, Role
from publisher.hub.local.bodies import body_of, count_in, json_object, object_in, objects_in, path_in, text_in
from publisher.hub.local.context import Context, alone, context, opened, page
from publisher.hub.local.lfs import POINTER_BYTES, Pointer, pointer_in
from publisher.hub.local.refusals import bad_request, stale_parent
from publisher.hub.local.repositories import Change, Delete, Put, Repository

_LARGEST_REGULAR = 10_000_000  # bytes; the Hub takes nothing larger as a regular git file
_PAGE = 50
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


async def preupload(request: Request) -> JSONResponse:
    """Answer POST .../preupload/REV: for each file, whether it goes to git or to LFS, and what digest is there."""
    repository = opened(request, Role.WRITE)
    files = objects_in(await json_object(request), "files")
    return JSONResponse({"files": await run_in_threadpool(_plans, request, repository, files=files)})


async def commit(request: Request) -> JSONResponse:
    """Answer POST .../commit/REV[?create_pr=1]: lines of JSON, a header and then one for each change."""
    repository = opened(request, Role.WRITE)
    body = await body_of(request, LIMITS.commit_bytes)
    return JSONResponse(await alone(request, lambda: _committed(request, repository, body=body)))


def history(request: Request) -> JSONResponse:
    """Answer GET .../commits/REV, newest first."""
    commits = opened(request, Role.READ).commits(request.path_params["revision"])
    shown, headers = page(request, commits, default_limit=_PAGE)
    listed = [
        {
            "id": commit.id,
            "title": commit.title,
            "message": commit.message,
            "date": f"{commit.date:%Y-%m-%dT%H:%M:%S.000Z}",
            "authors": [{"user": USER}],
        }
        for commit in shown
    ]
    return JSONResponse(listed, headers=headers)


def _plans(request: Request, repository: Repository, *, files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    present = repository.files(request.path_params["revision"])
    attributes = present.get(".gitattributes")
    text = repository.read(attributes).decode(errors="replace") if attributes else ""
    patterns = [line.split()[0] for line in text.splitlines() if "filter=lfs" in line]
    plans = []
    for file in files:
        path = path_in(file)
        plan = {"path": path, "uploadMode": _upload_mode(file, patterns), "shouldIgnore": False}
        if found := present.get(path):
            pointer = pointer_in(repository.read(found)) if found.size <= POINTER_BYTES else None
            plan["oid"] = pointer.oid if pointer else found.oid
        plans.append(plan)
    return plans


def _committed(request: Request, repository: Repository, *, body: bytes) -> dict[str, Any]:
    """Make the commit that the body describes, and return the answer."""
    hub = context(request)
    header, *operations = _lines(body)
    changes = [_change(operation, hub) for operation in operations]
    summary, description = text_in(header["value"], "summary"), text_in(header["value"], "description", "")
    ref, parent, number = repository.branch_ref(request.path_params["revision"]), _parent(header["value"]), 0
    if "create_pr" in request.query_params:
        start = repository.head(parent or ref)
        tree = repository.tree_with(changes, start=start)  # first, so that a bad change opens no pull request
        number = repository.open_pull_request(summary, start=start)
        ref = f"refs/pr/{number}"
    else:
        start = _unmoved(repository, ref, parent)
        tree = repository.tree_with(changes, start=start)
    message = "\n\n".join(part for part in (summary, description) if part)
    oid = repository.commit(tree, message, ref=ref, parent=start)
    url = hub.web_url(repository.resource)
    answer = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}"}
    return answer | ({"pullRequestUrl": f"{url}/discussions/{number}"} if number else {})


def _parent(header: dict[str, Any]) -> str:
    parent = text_in(header, "parentCommit", "")
    if parent and not _COMMIT.fullmatch(parent):
        raise bad_request("parentCommit is not a commit id of 7 to 40 hex digits")
    return parent


def _upload_mode(file: dict[str, Any], patterns: list[str]) -> str:
    name = PurePosixPath(path_in(file)).name
    by_name = any(fnmatch(name, pattern) for pattern in patterns)
    binary = b"\0" in _content(file, "sample")
    return "lfs" if by_name or binary or count_in(file, "size") > _LARGEST_REGULAR else "regular"


def _unmoved(repository: Repository, ref: str, parent: str) -> str:
    """Return the tip of the branch, which must be the parent that the caller named, if they named one."""
    tip = repository.head(ref)
    if not tip.startswith(parent):
        raise stale_parent()
    return tip


def _lines(body: bytes) -> list[dict[str, Any]]:
    lines = [object_in(line) for line in body.split(b"\n") if line.strip()]
    well_formed = all(isinstance(line.get("value"), dict) for line in lines)
    if not lines or not well_formed or lines[0].get("key") != "header":
        raise bad_request("a commit is lines of JSON objects, the header first")
    return lines


def _change(operation: dict[str, Any], hub: Context) -> Change:
    value = operation["value"]
    path = path_in(value)
    match operation.get("key"):
        case "file":
            return Put(path, _content(value, "content"))
        case "lfsFile":
            return Put(path, _stored(text_in(value, "oid"), hub).encoded())
        case "deletedFile" | "deletedFolder":
            return Delete(path)
        case _:
            raise bad_request("a commit has the operations file, lfsFile, deletedFile and deletedFolder")


def _content(value: dict[str, Any], name: str) -> bytes:
    """Decode the bytes in a field; refused (400) if it is not strictly base64, or holds more than git may hold here."""
    try:
        content = base64.b64decode(text_in(value, name), validate=True)
    except ValueError:
        raise bad_request(f"the field {name!r} is not base64") from None
    if len(content) > _LARGEST_REGULAR:
        raise bad_request(f"a file of more than {_LARGEST_REGULAR} bytes goes to LFS")
    return content


def _stored(oid: str, hub: Context) -> Pointer:
    size = hub.lfs.size(oid)
    if size is None:
        raise bad_request(f"the LFS object {oid} was not uploaded")
    return Pointer(oid, size)


_API = "/api/{kind:kind}/{namespace}/{name}"
ROUTES = [
    Route(_API + "/preupload/{revision:quoted}", preupload, methods=["POST"]),
    Route(_API + "/commit/{revision:quoted}", commit, methods=["POST"]),
    Route(_API + "/commits/{revision:quoted}", history),
]
