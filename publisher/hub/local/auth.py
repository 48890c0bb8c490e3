"""Who calls, and what they may do.

Two sorts of token work: those the local Hub was started with, each with a role, and signed ones it has issued itself,
which expire and may be good for one repository only. A token is never logged nor repeated in an answer.
"""

import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import jwt

from publisher.hub.local.refusals import bad_token, forbidden, token_needed

USER = "local-hub"
_ALGORITHM = "HS256"
_Value = TypeVar("_Value")
_ISSUED = "hf_jwt_"  # how the tokens that the Hub exchanges for an ID token begin


class Role(StrEnum):
    """What a token allows: reading, or reading and writing."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a valid token; `only` names the one repository it may write to, as `models/team/name`."""

    role: Role
    only: str | None = None

    def require_write(self, resource: str | None) -> None:
        """Refuse (403) unless this caller may write to the resource; None stands for creating a repository."""
        if self.role is not Role.WRITE:
            raise forbidden("this token may only read")
        if self.only not in {None, resource}:
            raise forbidden("this token may write to another repository only")


def secret_entry(known: Mapping[str, _Value], offered: str) -> _Value | None:
    """Return what is known under this secret; the time that takes tells nothing of how much of it was right."""
    found = None
    for secret, value in known.items():
        if hmac.compare_digest(secret.encode(), offered.encode(errors="replace")):
            found = value
    return found


class Tokens:
    """The tokens that this local Hub accepts."""

    def __init__(self, fixed: Mapping[str, Role], key: str) -> None:
        self._fixed = dict(fixed)
        self._key = key

    def caller(self, authorization: str | None) -> Caller | None:
        """Return who an Authorization header speaks for; None where there is no header.

        Raises:
            Refusal: 401, the token is unknown or has expired.
        """
        if not authorization:
            return None
        token = authorization.removeprefix("Bearer ")
        if role := secret_entry(self._fixed, token):
            return Caller(role)
        if not token.startswith(_ISSUED):
            raise bad_token()
        claims = self.verify(token.removeprefix(_ISSUED), "repository")
        return Caller(Role(claims["role"]), claims["only"])

    def required(self, authorization: str | None) -> Caller:
        """Return who an Authorization header speaks for.

        Raises:
            Refusal: 401, there is no token, or it is unknown or has expired.
        """
        caller = self.caller(authorization)
        if caller is None:
            raise token_needed()
        return caller

    def issue(self, resource: str, lifetime: int) -> str:
        """Return a token that may write to one repository for `lifetime` seconds."""
        return _ISSUED + self.sign({"role": Role.WRITE.value, "only": resource}, "repository", lifetime=lifetime)

    def sign(self, claims: Mapping[str, Any], purpose: str, *, lifetime: int) -> str:
        """Sign a statement that `verify` accepts for one purpose.

        Args:
            claims: what is stated.
            purpose: what the statement is for; it is good for nothing else.
            lifetime: seconds after which it is not accepted any more.

        Returns:
            A JSON Web Token.
        """
        return jwt.encode({**claims, "aud": purpose, "exp": time.time() + lifetime}, self._key, _ALGORITHM)

    def verify(self, token: str, purpose: str) -> dict[str, Any]:
        """Return the claims of a token from `sign`.

        Raises:
            Refusal: 401, the token was not signed here for this purpose, or has expired.
        """
        try:
            return jwt.decode(token, self._key, [_ALGORITHM], audience=purpose, options={"require": ["exp"]})
        except (jwt.InvalidTokenError, ValueError):
            raise bad_token() from None
