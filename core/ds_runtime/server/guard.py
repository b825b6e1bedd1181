"""The API key: one door in front of every route, the framework's and the plugins' too."""

from __future__ import annotations

import hmac

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ds_runtime.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/metrics"})


class Guard:
    """ASGI middleware: 401 for everything but `OPEN_PATHS` without the right bearer token."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._key = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._knows_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no API key"})
        else:
            await _refusal()(scope, receive, send)

    def _knows_key(self, scope: Scope) -> bool:
        header = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)


def _refusal() -> Response:
    error = ApiError(
        401,
        "the API key is missing or wrong: send 'Authorization: Bearer KEY' with the key that the "
        "server was started with",
        code="invalid_api_key",
    )
    body = msgspec.json.encode(error.body())
    headers = {"WWW-Authenticate": "Bearer"}
    return Response(body, error.status, headers, media_type="application/json")
