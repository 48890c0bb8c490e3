"""Repositories: create, delete, describe."""

from collections.abc import Mapping
from typing import Any

import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from publisher.localhub.auth import USER, Role
from publisher.localhub.context import Context, context, json_object, opened, text_in
from publisher.localhub.refusals import bad_request, repository_not_found
from publisher.localhub.repositories import MAIN, Entry, Repository
from publisher.localhub.routes.files import described

_KINDS = {"model": "models", "dataset": "datasets", "space": "spaces"}
_FENCE = "---\n"


async def create(request: Request) -> JSONResponse:
    """POST /api/repos/create."""
    hub, body = context(request), await json_object(request)
    hub.tokens.required(request.headers.get("authorization")).require_write(None)
    resource = _resource(body)
    url = hub.web_url(resource)
    hub.repositories.create(resource, private=body.get("visibility") == "private", url=url)
    name = resource.partition("/")[2]
    return JSONResponse({"url": url, "name": name, "id": name})


async def delete(request: Request) -> JSONResponse:
    """DELETE /api/repos/delete."""
    hub, resource = context(request), _resource(await json_object(request))
    hub.tokens.required(request.headers.get("authorization")).require_write(resource)
    hub.repositories.delete(resource)
    return JSONResponse({})


async def info(request: Request) -> JSONResponse:
    """GET /api/models/team/name[/revision/REV][?blobs=true]."""
    repository = opened(request, Role.READ)
    revision = repository.head(request.path_params.get("revision", MAIN))
    files = repository.files(revision)
    with_blobs = "blobs" in request.query_params
    siblings = [_sibling(context(request), repository, file, with_blobs=with_blobs) for file in files.values()]
    card = _card_data(repository, files)
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
            "tags": [*card.get("tags", []), "local Hub"],
            "cardData": card or None,
            "siblings": siblings,
        }
    )


async def may_read(request: Request) -> JSONResponse:
    """GET .../auth-check: nothing, or a refusal."""
    opened(request, Role.READ)
    return JSONResponse({})


async def may_write(request: Request) -> JSONResponse:
    """GET .../auth-check/write: nothing, or a refusal."""
    opened(request, Role.WRITE)
    return JSONResponse({})


async def validate_yaml(request: Request) -> JSONResponse:
    """POST /api/validate-yaml: whether a card's metadata parses; the Hub looks further."""
    content = text_in(await json_object(request), "content")
    errors, warnings = [], []
    try:
        metadata = _front_matter(content)
    except yaml.YAMLError:
        errors.append({"message": "local Hub: the card's metadata is not YAML"})
    else:
        if not metadata:
            warnings.append({"message": "local Hub: the card has no metadata"})
    return JSONResponse({"errors": errors, "warnings": warnings}, 400 if errors else 200)


async def without_owner(_: Request) -> JSONResponse:
    """Whatever is asked of `gpt2` and its like, which are names of the Hub's early days."""
    raise repository_not_found()


def timestamp_of(repository: Repository, revision: str) -> str:
    """When a commit was made, as the Hub writes it."""
    return f"{repository.commits(revision)[0].date:%Y-%m-%dT%H:%M:%S.000Z}"


def _resource(body: Mapping[str, Any]) -> str:
    kind = _KINDS.get(str(body.get("type") or "model"))
    if kind is None:
        raise bad_request("there are models, datasets and spaces only")
    return f"{kind}/{body.get('organization') or USER}/{body.get('name')}"


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
        return _front_matter(repository.read(files["README.md"]).decode(errors="replace"))
    except yaml.YAMLError:
        return {}


def _front_matter(card: str) -> dict[str, Any]:
    """The YAML between the first two `---` lines; dates stay text, since JSON has none."""
    card = card.lstrip()
    if not card.startswith(_FENCE):
        return {}
    metadata = yaml.load(card.removeprefix(_FENCE).partition(_FENCE)[0], _TextDates)  # noqa: S506 - a SafeLoader
    return metadata if isinstance(metadata, dict) else {}


class _TextDates(yaml.SafeLoader):
    """SafeLoader, less its reading of dates."""


_TextDates.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: str(node.value))

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
