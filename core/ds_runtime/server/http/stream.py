"""Server-sent events, and the watch for clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ds_runtime.server.errors import ClientGoneError, as_api_error
from ds_runtime.server.generate.choice import Choice, Piece
from ds_runtime.server.generate.formats import Format
from ds_runtime.server.generate.run import Run
from ds_runtime.server.http.bodies import Bodies
from ds_runtime.server.observe.request_record import exchange_of
from ds_runtime.server.protocols.translate import ClientNames

T = TypeVar("T")
_log = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; ClientGoneError, with `work` cancelled, when the client leaves."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events that ends `events` and calls `on_close`, come what may.
    write: the server's own `send`, past everything in between, which sees begin and end alone.
    """

    def __init__(
        self, events: AsyncGenerator[bytes], on_close: Callable[[], None], write: Send
    ) -> None:
        super().__init__()
        self._events, self._on_close, self._write = events, on_close, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client leaves."""
        try:
            with contextlib.suppress(ClientGoneError):
                await until_disconnect(receive, self._send(send))
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        write = self._write
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await write({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream_response(
    run: Run, form: Format, request: Request, names: ClientNames
) -> EventStream:
    """Wait for the first piece, so that refusals still get their status, then stream. names: of the
    request's fields, for errors inside the stream."""
    pieces = run.pieces()
    first = await until_disconnect(request.receive, anext(pieces))
    events = _events(run, form, pieces, names, request.app.state.bodies, first)
    return EventStream(events, run.close, exchange_of(request.scope).write)


def _worded(run: Run, form: Format, choice: Choice, piece: Piece) -> bytes:
    return b"".join([form.event(chunk) for chunk in form.chunks(run, choice, piece)])


async def _events(
    run: Run,
    form: Format,
    pieces: AsyncGenerator[tuple[Choice, Piece]],
    names: ClientNames,
    bodies: Bodies,
    first: tuple[Choice, Piece] | None = None,
) -> AsyncGenerator[bytes]:
    """All of a piece at a time; nothing where it has nothing to tell yet."""
    try:
        while True:
            try:
                choice, piece = first if first is not None else await anext(pieces)
            except StopAsyncIteration:
                break
            first = None
            if (numbers := choice.num_logprobs(piece, form.cumulative)) == 0:  # nearly always
                worded = _worded(run, form, choice, piece)
            else:
                worded = await bodies.word(numbers, partial(_worded, run, form, choice, piece))
            if worded:
                yield worded
        for chunk in form.last(run):
            yield form.event(chunk)
    except Exception as e:  # the status is sent already: tell it inside the stream
        error = as_api_error(names.renamed(e))
        if error.is_internal:
            _log.exception("a stream failed")
        yield form.failure(run, error)
    if form.end:
        yield form.end
