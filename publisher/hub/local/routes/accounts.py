"""Accounts and trusted publishing: who is asking, and the exchange of a CI job's ID token."""

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from publisher.hub.local.auth import USER
from publisher.hub.local.bodies import json_object
from publisher.hub.local.context import context


async def whoami(request: Request) -> JSONResponse:
    """Answer GET /api/whoami-v2 with whose token it is."""
    caller = context(request).tokens.required(request.headers.get("authorization"))
    token = {"displayName": "local Hub", "role": caller.role.value}
    auth = {"type": "access_token", "accessToken": token}
    return JSONResponse({"type": "user", "name": USER, "fullname": "local Hub", "orgs": [], "auth": auth})


async def exchange_token(request: Request) -> JSONResponse:
    """Answer POST /oauth/token: an ID token against a short-lived token."""
    return JSONResponse(context(request).publishers.exchange(await json_object(request)))


async def id_token(request: Request) -> JSONResponse:
    """Answer GET /github/id-token?audience=, as $ACTIONS_ID_TOKEN_REQUEST_URL does in a GitHub job."""
    audience = request.query_params.get("audience", "")
    return JSONResponse({"value": context(request).issuer.mint_for(request.headers.get("authorization"), audience)})


ROUTES = [
    Route("/api/whoami-v2", whoami),
    Route("/oauth/token", exchange_token, methods=["POST"]),
    Route("/github/id-token", id_token),
]
