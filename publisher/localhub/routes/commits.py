"""Commits: what is to be uploaded how, the commit itself, and the history."""

import base64
import json
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from publisher.localhub.auth import USER, Role
from publisher.localhub.context import Context, context, json_object, opened, page, text_in
from publisher.localhub.lfs import Pointer, pointer_in
from publisher.localhub.refusals import bad_request, stale_parent
from publisher.localhub.repositories import Change, Delete, Put, Repository

_LARGEST_REGULAR = 10_000_000  # bytes; the Hub takes nothing larger as a regular git file
_PAGE = 50


async def preupload(request: Request) -> JSONResponse:
    """POST .../preupload/REV: for each file, whether it goes to git or to LFS, and the digest of what is there."""
    repository, body = opened(request, Role.WRITE), await json_object(request)
    files = repository.files(request.path_params["revision"])
    attributes = repository.read(files[".gitattributes"]).decode() if ".gitattributes" in files else ""
    patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]
    plans = []
    for file in body.get("files", []):
        plan = {"path": file["path"], "uploadMode": _upload_mode(file, patterns), "shouldIgnore": False}
        if present := files.get(file["path"]):
            pointer = pointer_in(repository.read(present))
            plan["oid"] = pointer.oid if pointer else present.oid
        plans.append(plan)
    return JSONResponse({"files": plans})


async def commit(request: Request) -> JSONResponse:
    """POST .../commit/REV[?create_pr=1]: lines of JSON, a header and then one for each change."""
    hub, repository = context(request), opened(request, Role.WRITE)
    header, *operations = _lines(await request.body())
    changes = [_change(operation, hub) for operation in operations]
    summary = text_in(header["value"], "summary")
    ref, parent, number = repository.branch_ref(request.path_params["revision"]), header["value"].get("parentCommit"), 0
    if "create_pr" in request.query_params:
        start = repository.head(parent or ref)
        tree = repository.tree_with(changes, start=start)  # first, so that a bad change opens no pull request
        number = repository.open_pull_request(summary, start=start)
        ref = f"refs/pr/{number}"
    else:
        start = _unmoved(repository, ref, parent)
        tree = repository.tree_with(changes, start=start)
    message = "\n\n".join(part for part in (summary, header["value"].get("description")) if part)
    oid = repository.commit(tree, message, ref=ref, parent=start)
    url = hub.web_url(repository.resource)
    answer = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}"}
    return JSONResponse(answer | ({"pullRequestUrl": f"{url}/discussions/{number}"} if number else {}))


async def history(request: Request) -> JSONResponse:
    """GET .../commits/REV, newest first."""
    commits = opened(request, Role.READ).commits(request.path_params["revision"])
    listed = [
        {
            "id": commit.id,
            "title": commit.title,
            "message": commit.message,
            "date": f"{commit.date:%Y-%m-%dT%H:%M:%S.000Z}",
            "authors": [{"user": USER}],
        }
        for commit in commits
    ]
    return page(request, listed, default_limit=_PAGE)


def _upload_mode(file: dict[str, Any], patterns: list[str]) -> str:
    name = PurePosixPath(file["path"]).name
    by_name = any(fnmatch(name, pattern) for pattern in patterns)
    binary = b"\0" in base64.b64decode(file["sample"])
    return "lfs" if by_name or binary or file["size"] > _LARGEST_REGULAR else "regular"


def _unmoved(repository: Repository, ref: str, parent: str | None) -> str:
    """The tip of the branch, which is the parent that the caller named, if they named one."""
    tip = repository.head(ref)
    if parent and not tip.startswith(parent):
        raise stale_parent()
    return tip


def _lines(body: bytes) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in body.splitlines() if line]
    except ValueError:
        lines = []
    well_formed = all(isinstance(line, dict) and isinstance(line.get("value"), dict) for line in lines)
    if not lines or not well_formed or lines[0].get("key") != "header":
        raise bad_request("a commit is lines of JSON objects, the header first")
    return lines


def _change(operation: dict[str, Any], hub: Context) -> Change:
    value = operation["value"]
    path = text_in(value, "path")
    match operation.get("key"):
        case "file":
            return Put(path, base64.b64decode(text_in(value, "content")))
        case "lfsFile":
            return Put(path, _stored(text_in(value, "oid"), hub).encoded())
        case "deletedFile" | "deletedFolder":
            return Delete(path)
        case unknown:
            raise bad_request(f"a commit has no operation {unknown!r}")


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
