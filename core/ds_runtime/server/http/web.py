"""uvicorn, with bounds on what clients can hold: connections, heads, bodies, and time.

Clients that stall must not keep what others need. The kernel drops those that read nothing. A head
that does not come is dropped here, a body in bodies.py. And where connections run out, those that
ask nothing make room, the longest idle first. Where all ask, a new one is told so. What comes is
parsed in small parts, connection by connection: a quarter of a megabyte may hold thousands of
requests, chunks or headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ds_runtime.config import ServerConfig
from ds_runtime.server.errors import ApiError
from ds_runtime.server.http import descriptors

_HEAD_BYTES = 1 << 16
_HEADERS = 256
_PART_BYTES = 1 << 12  # that are parsed at once: a millisecond or two at worst
_PARSE_SECONDS = 0.002  # for parts of all connections, until other callbacks have their turn
_SCARCE = 16  # descriptors below the limit: what uses them has not given them back
_TURNS = 5  # of the event loop, in which what a client has sent already is read
_TELL_SECONDS = 60.0  # from one line in the log to the next
_log = logging.getLogger("ds_runtime.server")


class Door:
    """What one server's connections share. `limit`: open at once; `crowd`: accepted beyond that, to
    be told so; `patience`: seconds for a head.

    `idle` are those that wait for a request, the longest idle first. `unread` are new: what their
    clients have sent is not read yet. `refused` are those whose request gets a 503.
    """

    def __init__(self, patience: float, limit: int, crowd: int) -> None:
        self.patience, self.limit, self.crowd = patience, limit, crowd
        self.idle: dict[Connection, None] = {}
        self.unread: set[Connection] = set()
        self.refused: set[Connection] = set()
        self._told = -_TELL_SECONDS
        self._unparsed: deque[Connection] = deque()
        self._has_turn = False

    def accept(self, new: Connection, count: int) -> None:
        """Where there are far too many, the longest idle makes room, before any asks. count: of
        connections that are open.
        """
        if count > self.limit - self.crowd or self._is_scarce(new):
            self.unread.add(new)
            new.settle(_TURNS)
        if count > self.limit + self.crowd:
            (dropped := next(iter(self.idle), new)).drop()
            if dropped is new:
                self._tell(count)

    def admit(self, asking: Connection, count: int) -> None:
        """Where there are too many, one that asks nothing makes room for one that asks. Where all
        ask, or what is no connection has used up the descriptors, its request is refused.
        """
        scarce = self._is_scarce(asking)
        if not scarce and count - len(self.refused) - len(self.unread) <= self.limit:
            return
        if (oldest := next(iter(self.idle), None)) is not None:
            oldest.drop()
        if oldest is None or scarce:
            self.refused.add(asking)
            asking.app = _overloaded
            self._tell(count)

    def _is_scarce(self, connection: Connection) -> bool:
        return connection.number >= descriptors.limit() - _SCARCE

    def _tell(self, count: int) -> None:
        if (now := time.monotonic()) < self._told + _TELL_SECONDS:
            return
        self._told = now
        _log.warning(
            "no descriptor is left for more connections: requests get a 503 until some of the %d "
            "end. The limit of open files is %d: raise it, as by ulimit -n",
            count,
            descriptors.limit(),
        )

    def parse(self, connection: Connection) -> None:
        """Let a connection parse what has come, when it is its turn. It is not waiting for one."""
        self._unparsed.append(connection)
        if not self._has_turn:
            self._has_turn = True
            connection.loop.call_soon(self._turn)

    def _turn(self) -> None:
        end = time.perf_counter() + _PARSE_SECONDS
        while self._unparsed:
            connection = self._unparsed.popleft()
            connection.parse_part()
            if time.perf_counter() >= end:
                break
        self._has_turn = bool(self._unparsed)
        if self._has_turn:
            connection.loop.call_soon(self._turn)


class _Flow(FlowControl):
    """Whether a connection may parse and read; `changed` is called when that is another."""

    def __init__(self, transport: asyncio.Transport, changed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._changed = changed

    def pause_reading(self) -> None:
        """Not before it is resumed."""
        self.read_paused = True
        self._changed()

    def resume_reading(self) -> None:
        """From now on."""
        self.read_paused = False
        self._changed()


class Connection(HttpToolsProtocol):
    """One client's connection. Subclasses set `door`."""

    door: Door

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: TimerHandle | None = None
        self._head = 0  # bytes of a head that has not ended
        self._unparsed: deque[memoryview] = deque()
        self._has_turn, self._reads = False, True
        self.number = -1  # its descriptor
        self._fault = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room where there is none."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self._go_on)
        self.number = transport.get_extra_info("socket").fileno()
        self._wait()
        self.door.accept(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for, and nothing parsed."""
        self._unparsed.clear()
        self._stop_waiting()
        self.door.refused.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Leave what has come to the door."""
        view = memoryview(data)
        self._unparsed.extend(view[n : n + _PART_BYTES] for n in range(0, len(data), _PART_BYTES))
        self._go_on()

    def parse_part(self) -> None:
        """Parse one part of what has come, for the door."""
        self._has_turn = False
        if self._may_parse:
            self._parse(self._unparsed.popleft())
            self._go_on()

    def _go_on(self) -> None:
        """Ask for a turn if there is something to parse, and for more if there is nothing."""
        if self.transport.is_closing():
            self._unparsed.clear()
            return
        if self._may_parse and not self._has_turn:
            self._has_turn = True
            self.door.parse(self)
        reads = not self._unparsed and not self.flow.read_paused
        if reads != self._reads:
            self._reads = reads
            (self.transport.resume_reading if reads else self.transport.pause_reading)()

    @property
    def _may_parse(self) -> bool:
        """Requests that wait for an answer before theirs come first: each is many objects."""
        return bool(self._unparsed) and not self.flow.read_paused and not self.pipeline

    def _parse(self, data: memoryview) -> None:
        """A head that is too long is refused."""
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        waiting = self._timer is not None
        super().data_received(data)  # type: ignore[arg-type]
        if waiting and self._timer is not None:
            self._head += len(data)
            if self._head > _HEAD_BYTES:
                self.send_400_response(f"the request's head has more than {_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, in OpenAI's words, and close."""
        body = msgspec.json.encode(ApiError(400, self._fault or msg, code="invalid_http").body())
        head = [b"HTTP/1.1 400 Bad Request", b"content-type: application/json"]
        head += [b"content-length: %d" % len(body), b"connection: close"]
        self.transport.write(b"\r\n".join([*head, b"", body]))
        self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; too many are refused, as every look for one goes through all."""
        super().on_header(name, value)
        if len(self.headers) > _HEADERS:
            self._fault = f"the request has more than {_HEADERS} headers"
            raise ValueError(self._fault)

    def on_headers_complete(self) -> None:
        """A request begins."""
        self._stop_waiting()
        self.door.admit(self, len(self.connections))
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """The next may come; uvicorn itself closes connections that stay idle."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.door.idle[self] = None
        self._go_on()

    def settle(self, turns: int) -> None:
        """It is idle only after `turns` of the loop have shown that it asks nothing yet."""
        if self not in self.door.unread:
            return
        if turns:
            self.door.idle.pop(self, None)
            self.loop.call_soon(self.settle, turns - 1)
        else:
            self.door.unread.discard(self)
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
        self.door.unread.discard(self)
        self._head = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _overloaded(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer to a request on a connection too many, which it ends."""
    error = ApiError(
        503,
        "the server has as many connections as it can open: send the request again later",
        type="server_error",
        code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    )
    body = msgspec.json.encode(error.body(scope["path"]))
    response = Response(body, error.status, error.headers, media_type="application/json")
    await response(scope, receive, send)


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
    most, crowd = descriptors.connections()
    bound = type("Bound", (Connection,), {"door": Door(patience, most, crowd)})
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
            backlog=min(2048, crowd // 4),  # all of it is accepted at once, a few times
            timeout_keep_alive=60,
            timeout_graceful_shutdown=grace,
        )
    )
