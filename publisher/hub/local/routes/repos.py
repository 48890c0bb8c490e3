"""Repositories: create, delete, describe."""

from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from publisher.hub.local.auth import USER, Role
from publisher.hub.local.bodies import card_metadata, json_object, text_in
from publisher.hub.local.context import Context, alone, context, opened
from publisher.hub.local.refusals import bad_request, repository_not_found
from publisher.hub.local.repositories import MAIN, Entry, Repository
from publisher.hub.local.routes.files import described

_KINDS = {"model": "models", "dataset": "datasets", "space": "spaces"}


async def create(request: Request) -> JSONResponse:
    """Answer POST /api/repos/create: a new repository."""
    hub, caller = context(request), context(request).tokens.required(request.headers.get("authorization"))
    caller.require_write(None)
    body = await json_object(request)
    resource, private = _resource(body), body.get("visibility") == "private"
    url = hub.web_url(resource)
    await alone(request, lambda: hub.repositories.create(resource, private=private, url=url))
    name = resource.partition("/")[2]
    return JSONResponse({"url": url, "name": name, "id": name})


async def delete(request: Request) -> JSONResponse:
    """Answer DELETE /api/repos/delete, which removes a repository."""
    hub, caller = context(request), context(request).tokens.required(request.headers.get("authorization"))
    resource = _resource(await json_object(request))
    caller.require_write(resource)
    await alone(request, lambda: hub.repositories.delete(resource))
    return JSONResponse({})


def info(request: Request) -> JSONResponse:
    """Answer GET .../team/name[/revision/REV][?blobs=true] with what is known of a repository."""
    repository = opened(request, Role.READ)
    revision = repository.head(request.path_params.get("revision", MAIN))
    files = repository.files(revision)
    with_blobs = "blobs" in request.query_params
    siblings = [_sibling(context(request), repository, file, with_blobs=with_blobs) for file in files.values()]
    card = _card_data(repository, files)
    own_tags = card.get("tags")
    tags = [tag for tag in own_tags if isinstance(tag, str)] if isinstance(own_tags, list) else []
    name = repository.resource.partition("/")[2]
    return JSONResponse(
        {
            "_id": name,
            "id": name,
            "author": name.partition("/")[0],
            "sha": revision,
            "lastModified": timestamp_of(repository, revision),
            "private": repository.private,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [*tags, "local Hub"],
            "cardData": card or None,
            "siblings": siblings,
        }
    )


def may_read(request: Request) -> JSONResponse:
    """Answer GET .../auth-check with nothing, or with a refusal."""
    opened(request, Role.READ)
    return JSONResponse({})


def may_write(request: Request) -> JSONResponse:
    """Answer GET .../auth-check/write with nothing, or with a refusal."""
    opened(request, Role.WRITE)
    return JSONResponse({})


async def validate_yaml(request: Request) -> JSONResponse:
    """Answer POST /api/validate-yaml: whether a card's metadata parses; the Hub looks further."""
    content = text_in(await json_object(request), "content")
    errors, warnings = [], []
    try:
        metadata = await run_in_threadpool(card_metadata, content)
    except ValueError as error:
        errors.append({"message": f"local Hub: the card's metadata is not YAML: {error}"})
    else:
        if not metadata:
            warnings.append({"message": "local Hub: the card has no metadata"})
    return JSONResponse({"errors": errors, "warnings": warnings}, 400 if errors else 200)


async def without_owner(_: Request) -> JSONResponse:
    """Refuse what is asked of `gpt2` and its like, which are names of the Hub's early days."""
    raise repository_not_found()


def timestamp_of(repository: Repository, revision: str) -> str:
    """Return when a commit was made, as the Hub writes it."""
    return f"{repository.date(revision):%Y-%m-%dT%H:%M:%S.000Z}"


def _resource(body: dict[str, Any]) -> str:
    kind = _KINDS.get(text_in(body, "type", "model"))
    if kind is None:
        raise bad_request("there are models, datasets and spaces only")
    return f"{kind}/{text_in(body, 'organization', '') or USER}/{text_in(body, 'name')}"


def _sibling(hub: Context, repository: Repository, file: Entry, *, with_blobs: bool) -> dict[str, Any]:
    if not with_blobs:
        return {"rfilename": file.path}
    full = described(hub, repository, file)
    sibling = {"rfilename": file.path, "blobId": file.oid, "size": full["size"]}
    if lfs := full.get("lfs"):
        sibling["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
    return sibling


def _card_data(repository: Repository, files: Mapping[str, Entry]) -> dict[str, Any]:
    if "README.md" not in files:
        return {}
    try:
        return card_metadata(repository.read(files["README.md"]).decode(errors="replace"))
    except ValueError:
        return {}


ROUTES = [
    Route("/api/repos/create", create, methods=["POST"]),
    Route("/api/repos/delete", delete, methods=["DELETE"]),
    Route("/api/validate-yaml", validate_yaml, methods=["POST"]),
    Route("/api/{kind:kind}/{namespace}/{name}", info),
    Route("/api/{kind:kind}/{namespace}/{name}/auth-check", may_read),
    Route("/api/{kind:kind}/{namespace}/{name}/auth-check/write", may_write),
    Route("/api/{kind:kind}/{namespace}/{name}/revision/{revision:quoted}", info),
    Route("/api/{kind:kind}/{name}", without_owner),
    Route("/api/{kind:kind}/{name}/{asked}/{revision:quoted}", without_owner),
    Route("/{name}/resolve/{revision:quoted}/{path:quoted_path}", without_owner),
]
