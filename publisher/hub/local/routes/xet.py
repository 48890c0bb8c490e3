"""Xet: the tokens that the API gives out for its storage, and version 1 of the storage's own API.

Whatever else hf_xet asks for (global deduplication, grants, version 2) is answered 404, on which it does without.
"""

import re
import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from publisher.border.limits import LIMITS
from publisher.hub.local.auth import Role
from publisher.hub.local.bodies import body_of
from publisher.hub.local.context import Context, context, opened
from publisher.hub.local.refusals import Refusal, bad_token, entry_not_found
from publisher.hub.local.xet_format import Segment

_LIFETIME = 3600  # seconds
_PURPOSE = "xet-"


def write_token(request: Request) -> JSONResponse:
    """Answer GET .../xet-write-token/REV with a token for uploads."""
    opened(request, Role.WRITE)
    return _token(context(request), Role.WRITE)


def read_token(request: Request) -> JSONResponse:
    """Answer GET .../xet-read-token/REV with a token for downloads."""
    opened(request, Role.READ)
    return _token(context(request), Role.READ)


async def upload_xorb(request: Request) -> JSONResponse:
    """Answer POST /v1/xorbs/default/HASH with a new xorb."""
    _require(request, Role.WRITE)
    store, name = context(request).xet, request.path_params["hash"]
    store.xorb(name)
    content = await body_of(request, LIMITS.xet_bytes)
    inserted = await run_in_threadpool(store.add_xorb, name, content)
    return JSONResponse({"was_inserted": inserted})


async def upload_shard(request: Request) -> JSONResponse:
    """Answer POST /v1/shards: announced files are rebuilt and checked before the answer."""
    _require(request, Role.WRITE)
    await run_in_threadpool(context(request).xet.add_shard, await body_of(request, LIMITS.xet_bytes))
    return JSONResponse({"result": 1})


def reconstruction(request: Request) -> JSONResponse:
    """Answer GET /v1/reconstructions/HASH[, Range]: the pieces of xorbs that make up the file, or a range of it."""
    _require(request, Role.READ)
    hub = context(request)
    segments = hub.xet.segments(request.path_params["hash"])
    if segments is None:
        raise entry_not_found("Xet file")
    skipped, wanted = _within(segments, request.headers.get("range"))
    fetches: dict[str, list[dict[str, Any]]] = {}
    for segment in wanted:
        fetches.setdefault(segment.xorb, []).append(_fetch(hub, segment))
    terms = [{"hash": s.xorb, "unpacked_length": s.length, "range": {"start": s.first, "end": s.end}} for s in wanted]
    return JSONResponse({"offset_into_first_range": skipped, "terms": terms, "fetch_info": fetches})


def download_xorb(request: Request) -> Response:
    """Answer GET /v1/xorbs/default/HASH with a Range; like a signed address, it takes no token."""
    path = context(request).xet.xorb(request.path_params["hash"])
    if not path.exists():
        raise entry_not_found("xorb")
    return FileResponse(path)


def _token(hub: Context, role: Role) -> JSONResponse:
    """Return the same three facts in the body, for hf_xet, and in headers, for the Python client."""
    token, expiry = hub.tokens.sign({}, _PURPOSE + role.value, lifetime=_LIFETIME), int(time.time()) + _LIFETIME
    headers = {
        "X-Xet-Cas-Url": hub.cas_endpoint,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(expiry),
    }
    return JSONResponse({"casUrl": hub.cas_endpoint, "accessToken": token, "exp": expiry}, headers=headers)


def _require(request: Request, role: Role) -> None:
    """Require a Xet token of this role, or one that may write, as writers read too."""
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    for allowed in (role, Role.WRITE):
        try:
            context(request).tokens.verify(token, _PURPOSE + allowed.value)
        except Refusal:
            continue
        return
    raise bad_token()


def _within(segments: tuple[Segment, ...], header: str | None) -> tuple[int, list[Segment]]:
    """Return the segments that a Range header touches, and how many bytes of the first come before the range."""
    total = sum(segment.length for segment in segments)
    found = re.fullmatch(r"bytes=([0-9]{1,15})-([0-9]{0,15})", header or "bytes=0-")
    first, last = (int(found[1]), int(found[2] or total - 1)) if found else (0, total - 1)
    if first >= total:
        raise Refusal(416, "local Hub: the range begins after the end of the file")
    wanted: list[Segment] = []
    skipped = at = 0
    for segment in segments:
        if at + segment.length > first and at <= last:
            skipped = skipped if wanted else first - at
            wanted.append(segment)
        at += segment.length
    return skipped, wanted


def _fetch(hub: Context, segment: Segment) -> dict[str, Any]:
    start, end = hub.xet.byte_range(segment)
    return {
        "url": f"{hub.cas_endpoint}/v1/xorbs/default/{segment.xorb}",
        "range": {"start": segment.first, "end": segment.end},
        "url_range": {"start": start, "end": end},
    }


_API = "/api/{kind:kind}/{namespace}/{name}"
_CAS = "/xet/{hub}"  # `hub` makes the address this local Hub's own; see server.py
ROUTES = [
    Route(_API + "/xet-write-token/{revision:quoted}", write_token),
    Route(_API + "/xet-read-token/{revision:quoted}", read_token),
    Route(_CAS + "/v1/xorbs/default/{hash}", upload_xorb, methods=["POST"]),
    Route(_CAS + "/v1/xorbs/default/{hash}", download_xorb),
    Route(_CAS + "/v1/shards", upload_shard, methods=["POST"]),
    Route(_CAS + "/v1/reconstructions/{hash}", reconstruction),
]
