"""What a request handler needs of its local Hub, and the checks that come before every answer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse

from publisher.localhub.auth import Role, Tokens
from publisher.localhub.lfs import LfsStore
from publisher.localhub.oidc import Issuer, TrustedPublishers
from publisher.localhub.refusals import bad_request, repository_not_found
from publisher.localhub.repositories import Repositories, Repository
from publisher.localhub.xet import XetStore


@dataclass(frozen=True, slots=True)
class Context:
    """One local Hub's stores and addresses.

    `storage_endpoint` is the same server under another host name: the client takes the size and digest of a large
    file from the redirect itself only if that leaves the Hub's origin, and never sends its token there.
    """

    endpoint: str
    storage_endpoint: str
    cas_endpoint: str
    repositories: Repositories
    lfs: LfsStore
    xet: XetStore
    tokens: Tokens
    issuer: Issuer
    publishers: TrustedPublishers

    def web_url(self, resource: str) -> str:
        """The address of a repository's page."""
        return f"{self.endpoint}/{resource.removeprefix('models/')}"


def context(request: Request) -> Context:
    """The local Hub that serves this request."""
    return cast("Context", request.app.state.context)


def opened(request: Request, role: Role) -> Repository:
    """The repository that a request names, once its token is seen to allow `role`.

    Raises:
        Refusal: 401, 403 or 404, in this order.
    """
    hub, params = context(request), request.path_params
    resource = f"{params.get('kind', 'models')}/{params['namespace']}/{params['name']}"
    authorization = request.headers.get("authorization")
    caller = hub.tokens.caller(authorization)
    if role is Role.WRITE:
        hub.tokens.required(authorization).require_write(resource)
    repository = hub.repositories.get(resource)
    if repository.private and caller is None:
        raise repository_not_found()
    return repository


async def json_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request; an empty body is an empty object."""
    try:
        value = json.loads(await request.body() or b"{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise bad_request("the body is not a JSON object")
    return value


def text_in(body: dict[str, Any], name: str) -> str:
    """A text field of a JSON object; refused (400) if it is not there."""
    value = body.get(name)
    if not isinstance(value, str):
        raise bad_request(f"the body has no text field {name!r}")
    return value


def page(request: Request, items: Sequence[Any], *, default_limit: int) -> JSONResponse:
    """One page of a list, with a Link header to the next."""
    start = int(request.query_params.get("cursor", 0))
    stop = start + int(request.query_params.get("limit", default_limit))
    following = f'<{request.url.include_query_params(cursor=stop)}>; rel="next"'
    return JSONResponse(items[start:stop], headers={"Link": following} if stop < len(items) else None)
