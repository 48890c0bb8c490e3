"""Branches, tags and pull requests."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from publisher.hub.local.auth import USER, Role
from publisher.hub.local.bodies import json_object, text_in
from publisher.hub.local.context import alone, context, opened
from publisher.hub.local.refusals import bad_request
from publisher.hub.local.repositories import MAIN, Repository
from publisher.hub.local.routes.repos import timestamp_of

_LISTED = {"refs/heads/": "branches", "refs/tags/": "tags", "refs/pr/": "pullRequests"}


def refs(request: Request) -> JSONResponse:
    """Answer GET .../refs: branches, tags and pull requests."""
    answer: dict[str, list[dict[str, str]]] = {"branches": [], "converts": [], "tags": [], "pullRequests": []}
    for found in opened(request, Role.READ).refs():
        prefix = next(prefix for prefix in _LISTED if found.ref.startswith(prefix))
        name = found.ref.removeprefix(prefix)
        answer[_LISTED[prefix]].append({"name": name, "ref": found.ref, "targetCommit": found.commit})
    return JSONResponse(answer)


async def create_tag(request: Request) -> JSONResponse:
    """Answer POST .../tag/REV {tag, message?}."""
    repository, body = opened(request, Role.WRITE), await json_object(request)
    tag, message = text_in(body, "tag"), text_in(body, "message", "")
    revision = request.path_params["revision"]
    await alone(request, lambda: repository.create_tag(tag, revision, message=message))
    return JSONResponse({})


async def delete_tag(request: Request) -> JSONResponse:
    """Answer DELETE .../tag/TAG, which removes the tag."""
    repository, name = opened(request, Role.WRITE), request.path_params["revision"]
    await alone(request, lambda: repository.delete_ref(f"refs/tags/{name}"))
    return JSONResponse({})


async def create_branch(request: Request) -> JSONResponse:
    """Answer POST .../branch/NAME {startingPoint?}, which creates it."""
    repository, body = opened(request, Role.WRITE), await json_object(request)
    start = text_in(body, "startingPoint", MAIN)
    await alone(request, lambda: repository.create_branch(request.path_params["revision"], start))
    return JSONResponse({})


async def delete_branch(request: Request) -> JSONResponse:
    """Answer DELETE .../branch/NAME, which removes the branch."""
    repository, name = opened(request, Role.WRITE), request.path_params["revision"]
    await alone(request, lambda: repository.delete_ref(f"refs/heads/{name}"))
    return JSONResponse({})


async def open_pull_request(request: Request) -> JSONResponse:
    """Answer POST .../discussions {title, pullRequest: true}; discussions without changes are not covered."""
    repository, body = opened(request, Role.WRITE), await json_object(request)
    if not body.get("pullRequest"):
        raise bad_request("only pull requests are covered, not discussions")
    title = text_in(body, "title")
    number = await alone(request, lambda: repository.open_pull_request(title, start=MAIN))
    return JSONResponse(_described(request, repository, number))


def pull_request(request: Request) -> JSONResponse:
    """Answer GET .../discussions/N with the pull request of this number."""
    return JSONResponse(_described(request, opened(request, Role.READ), request.path_params["number"]))


def _described(request: Request, repository: Repository, number: int) -> dict[str, Any]:
    kind, _, name = repository.resource.partition("/")
    return {
        "num": number,
        "title": repository.pull_request_title(number),
        "status": "draft",
        "author": {"name": USER},
        "isPullRequest": True,
        "createdAt": timestamp_of(repository, f"refs/pr/{number}"),
        "changes": {"base": f"refs/heads/{MAIN}"},
        "filesWithConflicts": [],
        "events": [],
        "diff": "",
        "repo": {"name": name, "type": kind.removesuffix("s")},
        "url": f"{context(request).web_url(repository.resource)}/discussions/{number}",
    }


_API = "/api/{kind:kind}/{namespace}/{name}"
ROUTES = [
    Route(_API + "/refs", refs),
    Route(_API + "/tag/{revision:quoted}", create_tag, methods=["POST"]),
    Route(_API + "/tag/{revision:quoted}", delete_tag, methods=["DELETE"]),
    Route(_API + "/branch/{revision:quoted}", create_branch, methods=["POST"]),
    Route(_API + "/branch/{revision:quoted}", delete_branch, methods=["DELETE"]),
    Route(_API + "/discussions", open_pull_request, methods=["POST"]),
    Route(_API + "/discussions/{number:number}", pull_request),
]
