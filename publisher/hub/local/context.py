"""What a request handler needs of its local Hub, and the checks that come before every answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from publisher.hub.local.auth import Role, Tokens
from publisher.hub.local.bodies import number_in_query
from publisher.hub.local.lfs import LfsStore
from publisher.hub.local.oidc import Issuer, TrustedPublishers
from publisher.hub.local.refusals import repository_not_found
from publisher.hub.local.repositories import Repositories, Repository
from publisher.hub.local.xet import XetStore

_Item = TypeVar("_Item")


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
        """Return the address of a repository's page."""
        return f"{self.endpoint}/{resource.removeprefix('models/')}"


def context(request: Request) -> Context:
    """Return the context of the local Hub that serves this request."""
    return cast("Context", request.app.state.context)


def opened(request: Request, role: Role) -> Repository:
    """Open the repository that a request names, once its token is seen to allow `role`.

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


async def alone(request: Request, change: Callable[[], _Item]) -> _Item:
    """Make a change in a thread of its own, one at a time, and return what it returns."""

    def made() -> _Item:
        with context(request).repositories.writing:
            return change()

    return await run_in_threadpool(made)


def page(request: Request, items: Sequence[_Item], *, default_limit: int) -> tuple[Sequence[_Item], dict[str, str]]:
    """Return the part of a list that a request asks for.

    Args:
        request: the request, with `cursor` and `limit` in its query.
        items: the whole list.
        default_limit: items of one page, where the request asks for none or for more.

    Returns:
        The items of the page, and the headers that lead to the next one.
    """
    start = number_in_query(request, "cursor", 0)
    stop = start + max(1, min(number_in_query(request, "limit", default_limit), default_limit))
    following = f'<{request.url.include_query_params(cursor=stop)}>; rel="next"'
    return items[start:stop], {"Link": following} if stop < len(items) else {}
