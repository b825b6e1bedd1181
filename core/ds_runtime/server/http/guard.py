"""The doors in front of every route, the framework's and the plugins' too: keys, and web pages."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

import msgspec
from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ds_runtime.config import ServerConfig
from ds_runtime.server.errors import ApiError, shown
from ds_runtime.server.http.keys import Keys
from ds_runtime.server.observe.request_record import exchange_of
from ds_runtime.server.operate import dashboard

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"}) | dashboard.OPEN
_SAFE = frozenset({"GET", "HEAD"})


class Guard:
    """ASGI middleware: 401 for everything but `OPEN_PATHS` without a right key. The exchange is
    told who calls."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        caller = self._keys.caller(_sent(scope))
        if caller is not None and scope["type"] == "http":
            exchange_of(scope).caller = caller
        if caller is not None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        else:
            await _refuse(_no_key(), scope, receive, send, "no API key")


def _sent(scope: Scope) -> Iterator[bytes]:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key
        elif name == b"x-api-key":
            yield value


async def operators_only(request: Request) -> None:
    """ApiError unless the caller may operate the server: he has the admin key, if there is one."""
    exchange = exchange_of(request.scope)
    if exchange.is_foreign:
        raise _foreign(exchange.headers.get("origin"))
    caller = exchange.caller
    if caller.operates:
        return
    if not caller.name:
        raise _no_key("the admin key")
    raise ApiError(
        403,
        f"{request.url.path} needs the key of --admin-api-key: this key may not operate the server",
        code="admin_key_needed",
    )


async def json_only(request: Request) -> None:
    """ApiError 415 for a body that is not said to be JSON: a web page can send such a request to
    any server, without asking it first."""
    if request.method in _SAFE:
        return
    sent = request.headers.get("content-type")
    if sent is None:
        length = request.headers.get("content-length", "0")
        if length == "0" and "transfer-encoding" not in request.headers:
            return
    elif sent.partition(";")[0].strip().lower() == "application/json":
        return
    kind = "no content type" if sent is None else f"content type {shown(sent)}"
    raise ApiError(
        415,
        f"the body has {kind}: send JSON, with the header 'Content-Type: application/json'",
        code="unsupported_media_type",
    )


class BrowserGuard:
    """ASGI middleware: web pages of others cannot use a browser's way to this server.

    Without a key, answers 403 to requests that a browser sends for a page of another origin. The
    same holds for requests to loopback under the name of another host, which a page's owner lets
    point here. With --allowed-hosts other names are refused everywhere. Pages that --cors-origins
    names may do all, those of others under its '*' not what operates the server.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: Keys) -> None:
        self._app, self._keyed = app, keys.any
        self._origins = frozenset(origin.lower() for origin in config.cors_origins)
        self._hosts = tuple(host.lower() for host in config.allowed_hosts)
        self._own = config.host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        error = None if scope["type"] == "lifespan" else self._error(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await _refuse(error, scope, receive, send, error.message)

    def _error(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        checked = self._hosts or (not self._keyed and _is_loopback(scope.get("server")))
        if checked and host and not self._is_known(_name(host)):
            return ApiError(
                403,
                f"Host {shown(host)} is not a name of this server: use its address, or start it "
                f"with --allowed-hosts {_shortened(_name(host))}",
                code="host_not_allowed",
            )
        if not self._keyed and not self._is_ours(scope, headers, host):
            if "*" not in self._origins:
                return _foreign(headers.get("origin"))
            if scope["type"] == "http":
                exchange_of(scope).is_foreign = True
        return None

    def _is_known(self, name: str) -> bool:
        if name in ("localhost", self._own) or name.endswith(".localhost") or _is_address(name):
            return True  # an address is nobody's name
        return any(
            name == host or host == "*" or (host.startswith("*.") and name.endswith(host[1:]))
            for host in self._hosts
        )

    def _is_ours(self, scope: Scope, headers: Headers, host: str) -> bool:
        """Whether no other origin's page is behind it: browsers always say so."""
        path, site = scope["path"], headers.get("sec-fetch-site")
        safe = scope["type"] == "http" and scope["method"] in _SAFE
        if safe and (path in OPEN_PATHS or headers.get("sec-fetch-mode") == "navigate"):
            return True  # a link, or what anybody may read
        if site in ("same-origin", "none"):
            return True
        origin = headers.get("origin")
        if origin is None:
            return site is None
        origin = origin.lower()
        return origin in self._origins or (
            origin != "null" and origin.partition("://")[2] == host.lower()
        )


def _name(host: str) -> str:
    """The name in a Host header, without port, brackets and the dot at its end."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _shortened(name: str) -> str:
    return name if len(name) <= 80 and name.isprintable() else "NAME"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(server: tuple[str, int | None] | None) -> bool:
    return server is not None and _is_address(server[0]) and loopback(server[0])


def loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": why})
        return
    body = msgspec.json.encode(error.body(scope["path"]))
    response = Response(body, error.status, error.headers, media_type="application/json")
    await response(scope, receive, send)


def _foreign(origin: str | None) -> ApiError:
    which = "another origin" if origin is None else f"origin {shown(origin)}"
    return ApiError(
        403,
        f"pages of {which} may not do this: name the origin with --cors-origins, or start the "
        "server with --api-key",
        code="origin_not_allowed",
    )


def _no_key(which: str = "the API key") -> ApiError:
    return ApiError(
        401,
        f"{which} is missing or wrong: send 'Authorization: Bearer KEY' or 'x-api-key: KEY' "
        "with a key that the server was started with",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
