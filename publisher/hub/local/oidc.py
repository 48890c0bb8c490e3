"""Trusted publishing: a CI job's ID token is exchanged for a short-lived token of one repository.

`Issuer` stands in for GitHub Actions, `TrustedPublishers` for the Hub's side. Both sign and check real JSON Web
Tokens; they share one HMAC key, where GitHub signs with a private key. An exchange is refused unless the signature,
the audience and the expiry are right and every claim that the repository asks for is equal to the token's.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any

import jwt

from publisher.hub.local.auth import Tokens, secret_entry
from publisher.hub.local.refusals import Refusal, bad_token

_ALGORITHM = "HS256"
_ISSUER = "https://token.actions.local-hub.invalid"
_GRANT = "urn:ietf:params:oauth:grant-type:token-exchange"
_ID_TOKEN = "urn:ietf:params:oauth:token-type:id_token"  # noqa: S105 - the name of a token type, from RFC 8693
_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105 - likewise
_WEB_KINDS = ("datasets/", "spaces/")


class Issuer:
    """Issues ID tokens to CI jobs, as GitHub Actions does; `lifetime` is in seconds."""

    def __init__(self, endpoint: str, key: str) -> None:
        self.lifetime = 300
        self._endpoint = endpoint
        self._key = key
        self._jobs: dict[str, Mapping[str, str]] = {}

    def job(self, claims: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a job with these claims, as `permissions: id-token: write` gives it on GitHub."""
        request_token = secrets.token_hex(16)
        self._jobs[request_token] = dict(claims)
        return {
            "GITHUB_ACTIONS": "true",
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{self._endpoint}/github/id-token",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": request_token,
        }

    def mint_for(self, authorization: str | None, audience: str) -> str:
        """Return the ID token of the job whose request token an Authorization header carries.

        Raises:
            Refusal: 401, no job has this request token.
        """
        claims = secret_entry(self._jobs, (authorization or "").partition(" ")[2])  # some clients write bearer
        if claims is None:
            raise bad_token()
        return self.mint(claims, audience)

    def mint(self, claims: Mapping[str, str], audience: str) -> str:
        """Return an ID token with these claims for this audience."""
        now = time.time()
        standard = {"iss": _ISSUER, "aud": audience, "iat": now, "exp": now + self.lifetime}
        return jwt.encode({**claims, **standard}, self._key, _ALGORITHM)


class TrustedPublishers:
    """Which jobs each repository trusts; `lifetime` is that of an exchanged token, in seconds."""

    def __init__(self, endpoint: str, key: str, *, tokens: Tokens) -> None:
        self.lifetime = 3600
        self._endpoint = endpoint
        self._key = key
        self._tokens = tokens
        self._trusted: dict[str, list[Mapping[str, str]]] = {}

    def trust(self, resource: str, claims: Mapping[str, str]) -> None:
        """Record who may publish: jobs with all these claims may write to `team/name` or `datasets/team/name`."""
        if not claims:
            raise ValueError("a trusted publisher without a claim would be everyone")
        self._trusted.setdefault(_full(resource), []).append(dict(claims))

    def exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer POST /oauth/token (RFC 8693).

        Raises:
            Refusal: 400, with `error` invalid_request or invalid_grant as the Hub's documentation has them.
        """
        resource, id_token = request.get("resource"), request.get("subject_token")
        kinds = (request.get("grant_type"), request.get("subject_token_type"))
        if kinds != (_GRANT, _ID_TOKEN) or not isinstance(resource, str) or not isinstance(id_token, str):
            raise _refused("invalid_request", "a token exchange names a grant, an ID token and a resource")
        offered = self._verified(id_token)
        if not any(wanted.items() <= offered.items() for wanted in self._trusted.get(_full(resource), [])):
            raise _refused("invalid_grant", "no trusted publisher of this repository has these claims")
        return {
            "access_token": self._tokens.issue(_full(resource), self.lifetime),
            "issued_token_type": _ACCESS_TOKEN,
            "token_type": "bearer",
            "expires_in": self.lifetime,
        }

    def _verified(self, id_token: str) -> dict[str, Any]:
        try:
            return jwt.decode(
                id_token,
                self._key,
                [_ALGORITHM],
                audience=self._endpoint,
                issuer=_ISSUER,
                options={"require": ["exp", "iss", "aud"]},
            )
        except (jwt.InvalidTokenError, ValueError) as error:
            # The class of the error (ExpiredSignatureError, InvalidAudienceError ...) says enough and holds no token.
            raise _refused("invalid_grant", f"the ID token is not valid ({type(error).__name__})") from None


def _full(resource: str) -> str:
    return resource if resource.startswith(_WEB_KINDS) else f"models/{resource}"


def _refused(error: str, why: str) -> Refusal:
    return Refusal(400, f"local Hub: {error}: {why}", body={"error": error, "error_description": f"local Hub: {why}"})
