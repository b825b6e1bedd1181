"""The API key: one door in front of every route, the framework's and the plugins' too."""

from __future__ import annotations

import hmac

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ds_runtime.server import dashboard
from ds_runtime.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/metrics"}) | dashboard.OPEN


class Guard:
    """ASGI middleware: 401 for everything but `OPEN_PATHS` without the right key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._key = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._knows_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no API key"})
        else:
            await _refusal(scope["path"])(scope, receive, send)

    def _knows_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key):
                    return True
            elif name == b"x-api-key" and hmac.compare_digest(value, self._key):
                return True
        return False


def _refusal(path: str) -> Response:
    error = ApiError(
        401,
        "the API key is missing or wrong: send 'Authorization: Bearer KEY' or 'x-api-key: KEY' "
        "with the key that the server was started with",
        code="invalid_api_key",
    )
    body = msgspec.json.encode(error.body(path))
    headers = {"WWW-Authenticate": "Bearer"}
    return Response(body, error.status, headers, media_type="application/json")
