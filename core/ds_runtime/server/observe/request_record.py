"""One HTTP request with its answer, and the door where each is seen: counted, logged, traced.

Nothing here runs per token, except to pass a message on.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds_runtime.server.http.keys import Caller

if TYPE_CHECKING:
    from ds_runtime.server.generate.run import Run

REQUEST_ID = "x-request-id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # others would need quoting

current_id: ContextVar[str | None] = ContextVar("request_id", default=None)


@dataclass(slots=True)
class Exchange:
    """What is known of a request. `run` is set by routes that generate; `status` 0: no answer.
    `write`: the server's own `send`, for what no middleware needs to see.
    `is_foreign`: a page of an origin sends it that --cors-origins lets in without naming it.

    `route` is the pattern, such as /v1/models/{name}, or "other". `began` is in ns since 1970,
    `begin` and `end` are of `time.perf_counter`.
    """

    request_id: str
    method: str
    path: str
    client: str
    headers: Headers
    write: Send
    began: int = field(default_factory=time.time_ns)
    begin: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    route: str = "other"
    status: int = 0
    stream: bool = False
    gone: bool = False
    run: Run | None = None
    caller: Caller = field(default_factory=Caller)
    is_foreign: bool = False

    @property
    def seconds(self) -> float:
        """From arrival to the end of the answer."""
        return self.end - self.begin

    @property
    def asker(self) -> str:
        """Who asks, for what clients share by turns: an address, and a key where they divide."""
        return f"{self.client or 'unknown'} {self.caller.name}".rstrip()


def exchange_of(scope: Any) -> Exchange:
    """The exchange that a route serves."""
    found = scope["exchange"]
    assert isinstance(found, Exchange)
    return found


class Observe:
    """ASGI middleware around all others. `tell` are called when an exchange is over."""

    def __init__(self, app: ASGIApp, tell: Iterable[Callable[[Exchange], None]]) -> None:
        self._app, self._tell = app, tuple(tell)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; give every answer its request id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = scope["exchange"] = Exchange(
            request_id(headers.get(REQUEST_ID)),
            scope["method"],
            scope["path"],
            (scope.get("client") or ("",))[0],
            headers,
            send,
        )
        current_id.set(exchange.request_id)  # the task is this request's own
        done = False

        async def note(message: Message) -> None:
            nonlocal done
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = exchange.request_id
            else:
                done = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            exchange.status = exchange.status or 500  # the framework answers so, outside of this
            done = True
            raise
        finally:
            # Unknown paths share one label: clients must not be able to make new series.
            exchange.route = getattr(scope.get("route"), "path", "other")
            exchange.end = time.perf_counter()
            exchange.gone = not done
            for tell in self._tell:
                tell(exchange)


def request_id(sent: str | None) -> str:
    """The client's own id, if it is one that can stand in headers and logs; else a new one."""
    return sent if sent is not None and _GOOD_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}"
