"""Files at a revision: listings and downloads."""

from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from publisher.hub.local.auth import Role
from publisher.hub.local.bodies import body_of
from publisher.hub.local.context import Context, context, opened, page
from publisher.hub.local.lfs import POINTER_BYTES, Pointer, pointer_in
from publisher.hub.local.refusals import bad_request, entry_not_found
from publisher.hub.local.repositories import Entry, Repository

_PAGE = 1000
_MOST_FIELDS = 10_000  # of a form


def tree(request: Request) -> JSONResponse:
    """Answer GET .../tree/REV[/FOLDER][?recursive=true] with a page of a folder's entries."""
    repository, params = opened(request, Role.READ), request.path_params
    recursive = request.query_params.get("recursive", "").lower() in {"true", "1"}
    entries = repository.entries(params["revision"], params.get("path", ""), recursive=recursive)
    shown, headers = page(request, entries, default_limit=_PAGE)
    return JSONResponse([described(context(request), repository, entry) for entry in shown], headers=headers)


async def paths_info(request: Request) -> JSONResponse:
    """Answer POST .../paths-info/REV; a path that is not there is left out of the answer."""
    repository = opened(request, Role.READ)
    try:
        fields = parse_qs((await body_of(request)).decode(), max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise bad_request("the body is not a form") from None
    wanted = {path.rstrip("/") for path in fields.get("paths", [])}
    return JSONResponse(await run_in_threadpool(_described_all, request, repository, wanted=wanted))


def resolve(request: Request) -> Response:
    """Answer GET or HEAD /team/name/resolve/REV/PATH: the file itself, or a redirect to storage if it is large."""
    hub, repository, path = context(request), opened(request, Role.READ), request.path_params["path"]
    revision = repository.head(request.path_params["revision"])
    file = repository.files(revision).get(path)
    if file is None:
        raise entry_not_found(path, revision=revision)
    headers = {"X-Repo-Commit": revision}
    if pointer := _pointer(repository, file):
        headers |= _linked_headers(hub, pointer, f"{hub.endpoint}/api/{repository.resource}/xet-read-token/{revision}")
        return RedirectResponse(f"{hub.storage_endpoint}/lfs/{pointer.oid}", 302, headers=headers)
    content = repository.read(file)
    return Response(content, headers={**headers, "ETag": f'"{file.oid}"'}, media_type="application/octet-stream")


def _described_all(request: Request, repository: Repository, *, wanted: Collection[str]) -> list[dict[str, Any]]:
    entries = repository.entries(request.path_params["revision"], recursive=True)
    return [described(context(request), repository, entry) for entry in entries if entry.path in wanted]


def _pointer(repository: Repository, entry: Entry) -> Pointer | None:
    """Return the LFS pointer that a file is; what is too large for one is not read."""
    return pointer_in(repository.read(entry)) if not entry.folder and entry.size <= POINTER_BYTES else None


def described(hub: Context, repository: Repository, entry: Entry) -> dict[str, Any]:
    """Describe an entry as the API lists it: a large file with its own size and digest, not those of its pointer.

    Args:
        hub: the local Hub, which knows the Xet hash of a large file.
        repository: the repository that holds the entry.
        entry: the file or folder.

    Returns:
        The fields of one item of a listing.
    """
    kind = "directory" if entry.folder else "file"
    fields: dict[str, Any] = {"type": kind, "oid": entry.oid, "size": entry.size, "path": entry.path}
    if pointer := _pointer(repository, entry):
        fields["size"] = pointer.size
        fields["lfs"] = {"oid": pointer.oid, "size": pointer.size, "pointerSize": entry.size}
        if xet_hash := hub.xet.hash_of(pointer.oid):
            fields["xetHash"] = xet_hash
    return fields


def _linked_headers(hub: Context, pointer: Pointer, xet_token_url: str) -> dict[str, str]:
    tag = f'"{pointer.oid}"'
    headers = {"ETag": tag, "X-Linked-Etag": tag, "X-Linked-Size": str(pointer.size)}
    if xet_hash := hub.xet.hash_of(pointer.oid):
        headers |= {"X-Xet-Hash": xet_hash, "Link": f'<{xet_token_url}>; rel="xet-auth"'}
    return headers


_API = "/api/{kind:kind}/{namespace}/{name}"
ROUTES = [
    Route(_API + "/tree/{revision:quoted}", tree),
    Route(_API + "/tree/{revision:quoted}/{path:quoted_path}", tree),
    Route(_API + "/paths-info/{revision:quoted}", paths_info, methods=["POST"]),
    Route("/{kind:kind}/{namespace}/{name}/resolve/{revision:quoted}/{path:quoted_path}", resolve),
    Route("/{namespace}/{name}/resolve/{revision:quoted}/{path:quoted_path}", resolve),
]
