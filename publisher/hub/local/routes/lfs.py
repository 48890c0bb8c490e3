"""Git LFS: the batch API with the `basic` and `multipart` transfers, and the storage behind it.

As on the Hub, the addresses of the storage take no token, but are signed: each is good for one upload of one digest
and one size, and is given only to those who may write. Nothing is read or stored for any other.
"""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from publisher.border.limits import LIMITS
from publisher.hub.local.auth import Role
from publisher.hub.local.bodies import count_in, json_object, objects_in, pieces_of, text_in
from publisher.hub.local.context import Context, context, opened
from publisher.hub.local.refusals import bad_request, entry_not_found, too_large

_LIFETIME = 3600  # seconds
_PURPOSE = "lfs-upload"
_WHOLE, _COMPLETE = 0, -1  # what is signed in place of a part's number


async def batch(request: Request) -> JSONResponse:
    """Answer POST /team/name.git/info/lfs/objects/batch: where to upload what is not here yet."""
    opened(request, Role.WRITE)
    hub, body = context(request), await json_object(request)
    if body.get("operation") != "upload":
        raise bad_request("only the LFS upload batch is covered")
    wanted = [(text_in(found, "oid"), count_in(found, "size")) for found in objects_in(body, "objects")]
    objects = [await run_in_threadpool(_offer, hub, oid, size) for oid, size in wanted]
    in_parts = any("header" in offer.get("actions", {}).get("upload", {}) for offer in objects)
    answer = {"transfer": "multipart" if in_parts else "basic", "objects": objects}
    return JSONResponse(answer, media_type="application/vnd.git-lfs+json")


async def upload(request: Request) -> Response:
    """Answer PUT /lfs/OID?signature= with the whole content."""
    size = _signed_size(request, _WHOLE)
    await context(request).lfs.receive(request.path_params["oid"], pieces_of(request, size))
    return Response()


async def upload_part(request: Request) -> Response:
    """Answer PUT /lfs/OID/parts/N?signature= with one part of the content."""
    oid, number = request.path_params["oid"], request.path_params["number"]
    size = _signed_size(request, number)
    etag = await context(request).lfs.receive_part(oid, number, content=pieces_of(request, size))
    return Response(headers={"ETag": f'"{etag}"'})


async def complete(request: Request) -> JSONResponse:
    """Answer POST /lfs/OID/complete?signature= {parts: [{partNumber, etag}]}."""
    size, hub = _signed_size(request, _COMPLETE), context(request)
    listed = objects_in(await json_object(request), "parts")
    parts = {count_in(part, "partNumber"): text_in(part, "etag").strip('"') for part in listed}
    if sorted(parts) != list(range(1, hub.lfs.part_count(size) + 1)):
        raise bad_request("the parts are not the ones that were asked for")
    await run_in_threadpool(hub.lfs.assemble, request.path_params["oid"], tuple(parts.items()))
    return JSONResponse({})


async def verify(request: Request) -> JSONResponse:
    """Answer POST /lfs/verify {oid, size}: whether the content is here, and of this size."""
    hub = context(request)
    hub.tokens.required(request.headers.get("authorization"))
    body = await json_object(request)
    if hub.lfs.size(text_in(body, "oid")) != count_in(body, "size"):
        raise entry_not_found("LFS object of this size")
    return JSONResponse({})


def download(request: Request) -> Response:
    """Answer GET or HEAD /lfs/OID, whole or by range: `resolve` sends the client there."""
    oid = request.path_params["oid"]
    if context(request).lfs.size(oid) is None:
        raise entry_not_found(oid)
    return FileResponse(context(request).lfs.path(oid), headers={"ETag": f'"{oid}"'})


def _offer(hub: Context, oid: str, size: int) -> dict[str, Any]:
    offer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
    if hub.lfs.size(oid) == size:
        return offer  # no action: it is here already
    hub.lfs.require_room(size)
    address, count = f"{hub.storage_endpoint}/lfs/{oid}", hub.lfs.part_count(size)
    if count > LIMITS.upload_parts:
        raise too_large((hub.lfs.part_size or 0) * LIMITS.upload_parts)
    whole: dict[str, Any] = {"href": f"{address}?signature={_signature(hub, oid, part=_WHOLE, size=size)}"}
    if count > 1:
        most = hub.lfs.part_size or size
        parts = {
            str(number): f"{address}/parts/{number}?signature={_signature(hub, oid, part=number, size=most)}"
            for number in range(1, count + 1)
        }
        href = f"{address}/complete?signature={_signature(hub, oid, part=_COMPLETE, size=size)}"
        whole = {"href": href, "header": {"chunk_size": str(most), **parts}}
    return {**offer, "actions": {"upload": whole, "verify": {"href": f"{hub.endpoint}/lfs/verify"}}}


def _signature(hub: Context, oid: str, *, part: int, size: int) -> str:
    return hub.tokens.sign({"oid": oid, "part": part, "size": size}, _PURPOSE, lifetime=_LIFETIME)


def _signed_size(request: Request, part: int) -> int:
    """Return the bytes that may be sent to this very address; refused (401) if its signature is not one of this Hub."""
    hub, oid = context(request), request.path_params["oid"]
    hub.lfs.path(oid)
    claims = hub.tokens.verify(request.query_params.get("signature", ""), _PURPOSE)
    if (claims["oid"], claims["part"]) != (oid, part):
        raise bad_request("this address was signed for another upload")
    return int(claims["size"])


ROUTES = [
    Route("/{kind:kind}/{namespace}/{name}.git/info/lfs/objects/batch", batch, methods=["POST"]),
    Route("/{namespace}/{name}.git/info/lfs/objects/batch", batch, methods=["POST"]),
    Route("/lfs/verify", verify, methods=["POST"]),
    Route("/lfs/{oid}", upload, methods=["PUT"]),
    Route("/lfs/{oid}", download),
    Route("/lfs/{oid}/parts/{number:number}", upload_part, methods=["PUT"]),
    Route("/lfs/{oid}/complete", complete, methods=["POST"]),
]
