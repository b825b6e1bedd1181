"""One request, its streamed events timed as their bytes arrive.

A load generator must not be what is measured: bytes are stamped once per read, and msgspec decodes
of an event only the fields that are looked at. aiohttp speaks HTTP: 256 streams with 27,000 events
a second took a quarter of a core (benchmarks/serving_client.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from ds_runtime.common.address import Address, checked_key
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
        scheme = "https" if address.tls else "http"
        self._root = f"{scheme}://{address.netloc}{address.prefix}"
        # As it is: what is measured are streams, and reading them costs no decompression.
        self._headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        if checked_key(api_key) is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any], late: float = 0.0) -> Answer:
        """The answer, complete or with `error` set; never raises for what the server does."""
        answer, got = await self._exchange("POST", path, msgspec.json.encode(body), late)
        if answer.error is None:
            answer.error = _fault(answer, got)
        return answer

    async def get(self, path: str) -> tuple[int, bytes]:
        """(status, body); ConfigError when the server cannot be reached."""
        return await self.call("GET", path)

    async def call(self, method: str, path: str) -> tuple[int, bytes]:
        """The same of any method, without a body."""
        answer, body = await self._exchange(method, path, None, 0.0)
        if answer.status == 0:
            raise ConfigError(
                f"{self.url}{path}: {answer.error}; is the server up, --base-url right?"
            )
        return answer.status, body

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _exchange(
        self, method: str, path: str, body: bytes | None, late: float
    ) -> tuple[Answer, bytes]:
        answer, got = Answer(time.perf_counter(), late), b""
        try:
            async with asyncio.timeout(self.timeout):
                while True:
                    used = _Used()
                    try:
                        got = await self._send(method, path, body, answer, used)
                    except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                        if used.before and not answer.status:  # closed while nobody used it
                            continue
                        raise
                    break
        except TimeoutError:
            answer.error = f"no complete answer within {self.timeout:g} s (--timeout)"
        except _BrokenError as e:
            answer.error = str(e)
        except aiohttp.ClientResponseError as e:
            answer.error = f"the answer is no HTTP: {' '.join(e.message.split())}"
        except aiohttp.ClientPayloadError as e:
            answer.error = f"the server closed the connection within an answer: {e}"
        except aiohttp.ServerDisconnectedError as e:
            answer.error = f"the server closed the connection: {e}"
        except (aiohttp.ClientError, OSError, ValueError) as e:  # a host's name may be none
            answer.error = str(e) or type(e).__name__
        answer.end = answer.end or time.perf_counter()
        return answer, got

    async def _send(
        self, method: str, path: str, body: bytes | None, answer: Answer, used: _Used
    ) -> bytes:
        """Fill `answer`; the body, unless it is a stream."""
        if self._session is None:
            self._session = _session(self._headers)
        url, typed = URL(self._root + path, encoded=True), {"Content-Type": "application/json"}
        async with self._session.request(
            method,
            url,
            data=body,
            headers=None if body is None else typed,
            allow_redirects=False,
            trace_request_ctx=used,
        ) as response:
            answer.status = response.status
            try:
                if response.status == 200 and response.content_type == "text/event-stream":
                    await _stream(response, answer)
                    return b""
                got = await response.read()
                answer.end = time.perf_counter()
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {_message(got)}"
                elif got[:1] == b"{":
                    _whole(got, answer)
            except (msgspec.MsgspecError, UnicodeDecodeError) as e:
                raise _BrokenError(f"the answer is not as OpenAI's servers write it: {e}") from e
        return got


class _BrokenError(Exception):
    """The server's bytes are not an answer."""


class _Used:
    """Whether a request's connection was one of before."""

    before = False


def _session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """As many connections as there are requests; no cookies, and no timeout but our own."""

    async def reused(_: Any, context: Any, __: Any) -> None:
        context.trace_request_ctx.before = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reused)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers=headers,
        skip_auto_headers=("User-Agent", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
        trace_configs=[trace],
    )


async def _stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Take events as they come."""
    rest, ended = b"", False
    async for data in response.content.iter_any():
        now = answer.end = time.perf_counter()
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                ended = True
                continue
            chunk = decode(event)
            if chunk.error is not None:
                answer.error = f"error in the stream: {_message(event)}"
            else:
                answer.take(chunk, now)
    if answer.error is None and not ended:
        raise _BrokenError("the stream ended without [DONE]")


def _whole(body: bytes, answer: Answer) -> None:
    """An answer that is not streamed."""
    chunk = decode(body)
    if chunk.error is not None:
        answer.error = f"an error with status 200: {_message(body)}"
        return
    answer.take(chunk, answer.end)
    answer.events.clear()  # nothing came before the end


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
