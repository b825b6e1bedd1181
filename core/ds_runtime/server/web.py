"""uvicorn, with bounds on what clients can hold: connections, heads, bodies, and time.

Clients that stall must not keep what others need. The kernel drops those that read nothing; a head
that does not come is dropped here, a body in bodies.py; and where connections run out, those that
ask nothing make room, the longest idle first.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from asyncio import TimerHandle
from collections.abc import Iterator
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ds_runtime.config import ServerConfig
from ds_runtime.server.errors import ApiError

_HEAD_BYTES = 1 << 16
_SPARE = 128  # descriptors that are not connections


class Door:
    """What one server's connections share. `limit`: open at once; `patience`: seconds for a head.

    `idle` are those that wait for a request, the longest idle first.
    """

    def __init__(self, patience: float, limit: int) -> None:
        self.patience, self.limit = patience, limit
        self.idle: dict[Connection, None] = {}


class Connection(HttpToolsProtocol):
    """One client's connection. Subclasses set `door`."""

    door: Door

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: TimerHandle | None = None
        self._head = 0  # bytes of a head that has not ended

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room where there is none."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.door.limit:
            next(iter(self.door.idle)).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; a head that is too long is refused."""
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        waiting = self in self.door.idle
        super().data_received(data)
        if waiting and self in self.door.idle:
            self._head += len(data)
            if self._head > _HEAD_BYTES:
                self.send_400_response(f"the request's head has more than {_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, in OpenAI's words, and close."""
        body = msgspec.json.encode(ApiError(400, msg, code="invalid_http").body())
        head = [b"HTTP/1.1 400 Bad Request", b"content-type: application/json"]
        head += [b"content-length: %d" % len(body), b"connection: close"]
        self.transport.write(b"\r\n".join([*head, b"", body]))
        self.transport.close()

    def on_headers_complete(self) -> None:
        """A request begins."""
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """The next may come; uvicorn itself closes connections that stay idle."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.door.idle[self] = None

    def drop(self) -> None:
        """End the connection at once."""
        self._stop_waiting()
        self.transport.abort()

    def _wait(self) -> None:
        """A head must come in time, however slowly its bytes drip."""
        self.door.idle[self] = None
        if self._timer is None:
            self._timer = self.loop.call_later(self.door.patience, self.drop)

    def _stop_waiting(self) -> None:
        self.door.idle.pop(self, None)
        self._head = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Web(uvicorn.Server):
    """uvicorn, with the signals left to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: uvicorn would raise the signal again before the engine is stopped."""
        yield


def web(app: Any, config: ServerConfig, sock: socket.socket, grace: int) -> Web:
    """A server of `app` on `sock`. `grace`: seconds for answers that are open at shutdown."""
    patience = config.client_timeout
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by connections
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(patience * 1000))
    bound = type("Bound", (Connection,), {"door": Door(patience, most_connections())})
    return Web(
        uvicorn.Config(
            app,
            http=bound,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ssl_keyfile_password=config.ssl_keyfile_password,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=grace,
        )
    )


def most_connections() -> int:
    """Connections that fit, once this process may open as many files as its user is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS says infinity and means less
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return max(16, soft - _SPARE) if soft != resource.RLIM_INFINITY else 1 << 20
