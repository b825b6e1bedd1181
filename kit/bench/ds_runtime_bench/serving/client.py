"""One request over HTTP/1.1, its streamed events timed as their bytes arrive.

A load generator must not be what is measured: bytes are stamped once per read, httptools splits
HTTP, and msgspec decodes of an event only the fields that are looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Mapping
from typing import Any, cast

import httptools
import msgspec

from ds_runtime.address import Address, checked_key
from ds_runtime.errors import ConfigError
from ds_runtime_bench.serving.answer import Answer, decode

_ERROR_BYTES = 2000  # of a refusal's body, for its message
_SHOWN = 100  # bytes of a body that is no completion


class Target:
    """A server's address and its connections, which are used again. `base_url` may end in /v1.

    Raises ConfigError for an address that is no http or https URL.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        address = Address.of(base_url)
        self.url = base_url
        self.timeout = timeout
        self._tls = ssl.create_default_context() if address.tls else None
        self._host, self._port = address.host, address.port or (443 if self._tls else 80)
        self._prefix = address.prefix
        self._fixed = f"Host: {address.netloc}\r\nAccept: */*\r\n"
        if checked_key(api_key) is not None:
            self._fixed += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: Mapping[str, Any], late: float = 0.0) -> Answer:
        """The answer, complete or with `error` set; never raises for what the server does."""
        raw = msgspec.json.encode(body)
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._fixed}"
        head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        answer, got = await self._exchange(head.encode() + raw, late)
        if answer.error is None:
            answer.error = _fault(answer, got)
        return answer

    async def get(self, path: str) -> tuple[int, bytes]:
        """(status, body); ConfigError when the server cannot be reached."""
        return await self.call("GET", path)

    async def call(self, method: str, path: str) -> tuple[int, bytes]:
        """The same of any method, without a body."""
        length = "" if method == "GET" else "Content-Length: 0\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fixed}{length}\r\n"
        answer, body = await self._exchange(head.encode(), 0.0)
        if answer.status == 0:
            raise ConfigError(
                f"{self.url}{path}: {answer.error}; is the server up, --base-url right?"
            )
        return answer.status, body

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, request: bytes, late: float) -> tuple[Answer, bytes]:
        answer = Answer(time.perf_counter(), late)
        body = b""
        try:
            async with asyncio.timeout(self.timeout):
                while True:
                    known = bool(self._idle)
                    connection = self._idle.pop() if known else await self._connect()
                    try:
                        body = await connection.exchange(request, answer)
                    except _StaleError:
                        if known:  # it was closed while nobody used it
                            continue
                        raise
                    finally:
                        if connection.reusable:
                            self._idle.append(connection)
                        else:
                            connection.close()
                    break
        except TimeoutError:
            answer.error = f"no complete answer within {self.timeout:g} s (--timeout)"
        except (OSError, UnicodeError, _BrokenError) as e:  # a host's name may be none
            answer.error = str(e) or type(e).__name__
        answer.end = answer.end or time.perf_counter()
        return answer, body

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        name = self._host if self._tls else None
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._tls, server_hostname=name
        )
        return connection


class _BrokenError(Exception):
    """The server's bytes are not an answer, or end before it does."""


class _StaleError(_BrokenError):
    """The connection ended before the first byte of an answer."""


class _Connection(asyncio.Protocol):
    """One connection, one request at a time; httptools calls the on_ methods."""

    def __init__(self) -> None:
        self.reusable = False
        self._done: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, answer: Answer) -> bytes:
        """Send, and fill `answer`; the body, unless it is a stream."""
        if self._transport.is_closing():
            raise _StaleError("the connection was closed")
        self.reusable, self._seen = False, False
        self._answer, self._body, self._stream = answer, bytearray(), False
        self._rest, self._ended = b"", False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        answer.end = self._now
        if answer.status != 200:
            answer.error = f"HTTP {answer.status}: {_message(bytes(self._body))}"
        elif self._stream:
            if answer.error is None and not self._ended:
                raise _BrokenError("the stream ended without [DONE]")
        elif self._body[:1] == b"{":
            self._whole(bytes(self._body))
        return bytes(self._body)

    def close(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Stamp and parse."""
        self._now = time.perf_counter()
        self._seen = True
        if self._done is None or self._done.done():
            self._transport.abort()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            said = e.__context__ or e
            self._fail(_BrokenError(f"the answer is not as OpenAI's servers write it: {said}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what waits."""
        self.reusable = False
        if self._done is None or self._done.done():
            return
        reason = f"the server closed the connection{f': {exc}' if exc else ''}"
        self._fail(
            _BrokenError(f"{reason} within an answer") if self._seen else _StaleError(reason)
        )

    def _fail(self, error: _BrokenError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # httptools' side

    def on_header(self, name: bytes, value: bytes) -> None:
        """Whether this is a stream."""
        if name.lower() == b"content-type":
            self._stream = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        """The status."""
        self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A stream's events are taken at once; other bodies are kept."""
        if not self._stream or self._answer.status != 200:
            self._body += data
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        """The request is answered."""
        self.reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        chunk, answer = decode(data), self._answer
        if chunk.error is not None:
            answer.error = f"error in the stream: {_message(data)}"
            return
        answer.take(chunk, self._now)

    def _whole(self, body: bytes) -> None:
        """An answer that is not streamed."""
        try:
            chunk = decode(body)
        except msgspec.MsgspecError as e:
            raise _BrokenError(f"the answer is not as OpenAI's servers write it: {e}") from e
        if chunk.error is not None:
            self._answer.error = f"an error with status 200: {_message(body)}"
            return
        self._answer.take(chunk, self._now)
        self._answer.events.clear()  # nothing came before the end


def _fault(answer: Answer, body: bytes) -> str | None:
    """Why an answer with status 200 is no completion: a proxy's page, another route's JSON."""
    if answer.choices:
        return None
    said = body[:_SHOWN].decode(errors="replace")
    return "the answer holds no choices" + (f": {said!r}" if said else "")


def _message(body: bytes) -> str:
    """The sentence in an error's body, whoever's form it has."""
    with contextlib.suppress(msgspec.MsgspecError):
        said = msgspec.json.decode(body)
        inner = said.get("error", said) if isinstance(said, dict) else said
        if isinstance(inner, dict):
            inner = inner.get("message") or inner.get("detail") or inner
        return str(inner)[:_ERROR_BYTES]
    return body[:_ERROR_BYTES].decode(errors="replace") or "an empty body"
