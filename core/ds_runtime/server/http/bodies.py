"""The bytes of request bodies: how many there may be, how fast they come, who works on them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from ds_runtime.server.errors import ApiError, ClientGoneError

T = TypeVar("T")
LARGE = 1 << 18
_PER_TOKEN, _BESIDE = 16, 1 << 20  # bytes for each token of the context, and for what is beside
_BODIES = 16  # of the largest size, in memory at once
_PARTS = 1 << 16  # arrays and objects of one body, or members of these
_PART_BYTES = 1 << 15  # that are counted at once
_NUMBERS = 4096  # that are written in some milliseconds
_THREADS = 3  # of which one may be at a large body
_BODY_SECONDS, _BODY_RATE = 30.0, 1 << 15  # for a body of any size; and bytes per second
_DRAIN_BYTES = 1 << 28
_DRAIN_SECONDS = 10.0


class Bodies:
    """All bodies that are being read or worked on.

    `limit`: bytes of one; all together, `held`, have sixteen times as many. One thread at a time
    reads JSON, as no other runs meanwhile, and one large body at a time is worked on.
    """

    def __init__(self, most: int | None, context: Callable[[], int]) -> None:
        self._most, self._context, self.held = most, context, 0
        self._large = asyncio.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "body")
        self._reading = threading.Lock()
        self._preparing, self._mine = threading.Lock(), threading.local()

    @property
    def limit(self) -> int:
        """What the operator said, or what a prompt of the whole context can need with its tools."""
        return self._context() * _PER_TOKEN + _BESIDE if self._most is None else self._most

    def turn(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Waits until a body of this many bytes may be worked on."""
        return self._large if size > LARGE else contextlib.nullcontext()

    async def word(self, numbers: int, job: Callable[[], T]) -> T:
        """The result of a job that words an answer with this many log-probabilities: here, or in a
        thread where there are many."""
        return job() if numbers <= _NUMBERS else await self.work(job)

    async def work(self, job: Callable[[], T]) -> T:
        """The result of a job, from one of few threads: each makes the event loop wait."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(context.run, job))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One thread at a time reads JSON, in which there are no cycles to look for."""
        with self._reading:
            gc.disable()
            try:
                yield
            finally:
                gc.enable()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """One thread at a time prepares what was read: many would keep the interpreter from the
        event loop in turns."""
        with self._preparing:
            self._mine.has_turn = True
            try:
                yield
            finally:
                self._mine.has_turn = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While this thread waits for another process, others may prepare."""
        if not getattr(self._mine, "has_turn", False):
            yield
            return
        self._preparing.release()
        try:
            yield
        finally:
            self._preparing.acquire()

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """A function that takes room for this many bytes more, until the end of the context.

        It raises ApiError 503 when there is none: others hold it.
        """
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            # Small ones, of one part, always fit.
            if mine and size and self.held + size > _BODIES * self.limit:
                raise ApiError(
                    503,
                    f"the bodies of other requests hold {self.held} bytes: try again",
                    type="server_error",
                    code="busy",
                    headers={"Retry-After": "1", "Connection": "close"},
                )
            mine, self.held = mine + size, self.held + size

        try:
            yield take
        finally:
            self.held -= mine


class Shape:
    """What a body builds values from, counted part by part: what is in strings does not count.

    No reader lets another thread run, so that these are bounded before it begins.
    """

    @classmethod
    def of(cls, raw: bytes, limit: int) -> Shape:
        """That of a whole body, which may have `limit` bytes; ApiError for too many of a kind.

        Others run between two parts.
        """
        shape = cls()
        for begin in range(0, len(raw), _PART_BYTES):
            shape.add(raw[begin : begin + _PART_BYTES])
            if fault := shape.fault(limit):
                raise ApiError(
                    400, f"the body's JSON has {fault}: send fewer", code="body_too_large"
                )
        return shape

    def __init__(self) -> None:
        self.containers = self.members = self.items = 0
        self._in_string, self._rest = False, b""

    def add(self, part: bytes) -> None:
        """The next bytes."""
        part = self._rest + part
        cut = (len(part) - len(part.rstrip(b"\\"))) % 2  # half of an escape
        self._rest, part = part[len(part) - cut :], part[: len(part) - cut]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[self._in_string :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        self.containers += outside.count(b"[") + outside.count(b"{")
        self.members += outside.count(b":")
        self.items += outside.count(b",")

    def fault(self, limit: int) -> str:
        """What it has too many of, where a body may have `limit` bytes; "" if nothing."""
        for count, most, what in (
            (self.containers, _PARTS, "arrays and objects"),
            (self.members, _PARTS, "members of objects"),
            (self.items, limit // _PER_TOKEN + _PARTS, "values"),
        ):
            if count > most:
                return f"more than {most} {what}"
        return ""


async def read_body(request: Request, limit: int, room: Callable[[int], None]) -> bytes:
    """The body's bytes, never more than `limit` of them in memory; `room` is asked for each part.

    ApiError 408 for one that comes too slowly, 413 for one that is too large.
    """
    begin = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(begin + _BODY_SECONDS) as timeout:
            return await _read(request, limit, room, timeout, begin)
    except TimeoutError as e:
        raise ApiError(
            408,
            f"the body came too slowly: {_BODY_SECONDS:g} s and one more for every {_BODY_RATE} "
            "bytes are given",
            code="body_too_slow",
            headers={"Connection": "close"},
        ) from e


async def _read(
    request: Request,
    limit: int,
    room: Callable[[int], None],
    timeout: asyncio.Timeout,
    begin: float,
) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    if size > limit:
        if "expect" not in request.headers:  # those that ask first send nothing
            await _drain(request)
        raise _large(size, limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        chunk, more = await _receive(request)
        size += len(chunk)
        if size > limit:
            parts.clear()
            if more:
                await _drain(request)
            raise _large(size, limit)
        room(len(chunk))
        parts.append(chunk)
        timeout.reschedule(begin + _BODY_SECONDS + size / _BODY_RATE)
    return b"".join(parts)


async def _receive(request: Request) -> tuple[bytes, bool]:
    """The next bytes of the body, and whether more come. ClientGoneError where nobody is left."""
    message = await request.receive()
    if message["type"] != "http.request":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


async def _drain(request: Request) -> None:
    """Throw away what comes, within bounds: clients that write everything before they read would
    see a reset instead of the answer.
    """
    seen, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while more and seen < _DRAIN_BYTES:
                chunk, more = await _receive(request)
                seen += len(chunk)


def _large(size: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {size} bytes or more: the limit is {limit}; send less, or start the "
        "server with a larger --max-body",
        code="body_too_large",
        headers={"Connection": "close"},
    )
