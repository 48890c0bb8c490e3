"""Git LFS: the batch API with the `basic` and `multipart` transfers, and the storage behind it.

As on the Hub, the addresses of the storage take no token. Here they are not signed either: only what has the
announced digest is kept, and the batch that names it is refused to those who may not write.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from publisher.localhub.auth import Role
from publisher.localhub.context import Context, context, json_object, opened, text_in
from publisher.localhub.refusals import bad_request, entry_not_found


async def batch(request: Request) -> JSONResponse:
    """POST /team/name.git/info/lfs/objects/batch: where to upload what is not here yet."""
    opened(request, Role.WRITE)
    hub, body = context(request), await json_object(request)
    if body.get("operation") != "upload":
        raise bad_request("only the LFS upload batch is covered")
    objects = [_offer(hub, str(wanted.get("oid")), int(wanted.get("size", -1))) for wanted in body.get("objects", [])]
    in_parts = any("header" in offer.get("actions", {}).get("upload", {}) for offer in objects)
    answer = {"transfer": "multipart" if in_parts else "basic", "objects": objects}
    return JSONResponse(answer, media_type="application/vnd.git-lfs+json")


async def upload(request: Request) -> Response:
    """PUT /lfs/OID: the whole content."""
    await context(request).lfs.receive(request.path_params["oid"], request.stream())
    return Response()


async def upload_part(request: Request) -> Response:
    """PUT /lfs/OID/parts/N."""
    oid, number = request.path_params["oid"], request.path_params["number"]
    etag = context(request).lfs.receive_part(oid, number, content=await request.body())
    return Response(headers={"ETag": f'"{etag}"'})


async def complete(request: Request) -> JSONResponse:
    """POST /lfs/OID/complete {parts: [{partNumber, etag}]}."""
    body = await json_object(request)
    parts = [(int(part["partNumber"]), str(part["etag"]).strip('"')) for part in body.get("parts", [])]
    await context(request).lfs.assemble(request.path_params["oid"], parts)
    return JSONResponse({})


async def verify(request: Request) -> JSONResponse:
    """POST /lfs/verify {oid, size}: whether the content is here, and of this size."""
    body = await json_object(request)
    if context(request).lfs.size(text_in(body, "oid")) != body.get("size"):
        raise entry_not_found("LFS object of this size")
    return JSONResponse({})


async def download(request: Request) -> Response:
    """GET or HEAD /lfs/OID, whole or by range: where `resolve` sends the client."""
    oid = request.path_params["oid"]
    if context(request).lfs.size(oid) is None:
        raise entry_not_found(oid)
    return FileResponse(context(request).lfs.path(oid), headers={"ETag": f'"{oid}"'})


def _offer(hub: Context, oid: str, size: int) -> dict[str, Any]:
    offer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
    if hub.lfs.size(oid) == size:
        return offer  # no action: it is here already
    address = f"{hub.storage_endpoint}/lfs/{oid}"
    whole: dict[str, Any] = {"href": address}
    if (count := hub.lfs.part_count(size)) > 1:
        parts = {str(number): f"{address}/parts/{number}" for number in range(1, count + 1)}
        whole = {"href": f"{address}/complete", "header": {"chunk_size": str(hub.lfs.part_size), **parts}}
    return {**offer, "actions": {"upload": whole, "verify": {"href": f"{hub.endpoint}/lfs/verify"}}}


ROUTES = [
    Route("/{kind:kind}/{namespace}/{name}.git/info/lfs/objects/batch", batch, methods=["POST"]),
    Route("/{namespace}/{name}.git/info/lfs/objects/batch", batch, methods=["POST"]),
    Route("/lfs/verify", verify, methods=["POST"]),
    Route("/lfs/{oid}", upload, methods=["PUT"]),
    Route("/lfs/{oid}", download),
    Route("/lfs/{oid}/parts/{number:int}", upload_part, methods=["PUT"]),
    Route("/lfs/{oid}/complete", complete, methods=["POST"]),
]
