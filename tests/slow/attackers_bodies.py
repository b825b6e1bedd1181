"""Clients that send bodies meant to stop a server: large, deeply or widely nested, many at once.

What the server answers is not looked at: it may refuse, but must go on.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import httpx

_JSON = {"content-type": "application/json"}
_CHAT = '{"messages": [{"role": "user", "content": "Say ok"}], "max_tokens": 1, %s}'
_ABOUT = 16_000_000  # bytes that a server without bounds would read


def _nested(size: int) -> bytes:
    """Lists in a list."""
    return (_CHAT % ('"tools": [' + ",".join(["[]"] * (size // 3)) + "]")).encode()


def _deep(size: int) -> bytes:
    return (
        _CHAT % ('"chat_template_kwargs": ' + '{"a":' * (size // 6) + "1" + "}" * (size // 6))
    ).encode()


def _objects(size: int) -> bytes:
    return (_CHAT % ('"metadata": [' + ",".join(['{"a":{}}'] * (size // 9)) + "]")).encode()


def _names(size: int) -> bytes:
    each = ",".join(f'"{n}":"x"' for n in range(size // 11))
    return (_CHAT % f'"logit_bias": {{{each}}}').encode()


def _ids(size: int) -> bytes:
    return ('{"prompt": [' + ",".join(["7"] * (size // 2)) + "]}").encode()


def _text(size: int) -> bytes:
    return ('{"prompt": "' + "ab, [c] " * (size // 8) + '"}').encode()


def _escapes(size: int) -> bytes:
    return ('{"prompt": "' + "\\u4f60\\n" * (size // 8) + '"}').encode()


_MAKERS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "nested": ("/v1/chat/completions", _nested),
    "deep": ("/v1/chat/completions", _deep),
    "objects": ("/v1/chat/completions", _objects),
    "names": ("/v1/chat/completions", _names),
    "ids": ("/v1/completions", _ids),
    "text": ("/v1/completions", _text),
    "escapes": ("/v1/completions", _escapes),
}


def bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """By name: a route, and a body of about so many bytes that is hard to read."""
    return {name: (path, make(size)) for name, (path, make) in _MAKERS.items()}


@cache
def _made(size: int) -> list[tuple[str, bytes]]:
    return list(bodies(size).values())


def _post(http: httpx.Client, path: str, body: bytes) -> None:
    with contextlib.suppress(httpx.HTTPError):
        http.post(path, content=body, headers=_JSON)


def _together(http: httpx.Client, size: int, count: int) -> None:
    """So many clients at once, with bodies of all kinds."""
    made = _made(size)
    with ThreadPoolExecutor(count) as pool:
        for n in range(count):
            pool.submit(_post, http, *made[n % len(made)])


def one_large_body(http: httpx.Client, round: int) -> None:
    """16 MB of nested lists."""
    _post(http, *_made(_ABOUT)[0])


def sixteen_large_bodies(http: httpx.Client, round: int) -> None:
    """16 MB of all kinds from sixteen clients at once."""
    _together(http, _ABOUT, 16)


def largest_that_is_read(http: httpx.Client, round: int) -> None:
    """Sixteen clients with bodies just below what any context may need."""
    _together(http, 900_000, 16)


def middling(http: httpx.Client, round: int) -> None:
    """Sixteen clients with bodies that several threads may work on."""
    _together(http, 190_000, 16)


def sixty_small(http: httpx.Client, round: int) -> None:
    """Sixty clients with 10 KB of text, messages or tools each, that are rendered and counted."""
    tool = '{"type": "function", "function": {"name": "f%d", "parameters": {"type": "object"}}}'
    message = '{"role": "user", "content": "Say ok"}'
    made = (
        f'{{"prompt": "{"ab cd " * 1650}"}}',
        f'{{"messages": [{",".join([message] * 250)}]}}',
        f'{{"messages": [{message}], "tools": [{",".join(tool % n for n in range(130))}]}}',
    )
    with ThreadPoolExecutor(60) as pool:
        for number in range(60):
            pool.submit(_post, http, "/tokenize", made[number % 3].encode())


def pieces(http: httpx.Client, round: int) -> None:
    """A megabyte of requests on one connection, of chunks of one byte, or of headers."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    sent = (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 25_000,
        head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 170_000,
        head + b"a: b\r\n" * 170_000 + b"\r\n",
    )[round % 3]
    address = http.base_url.host, http.base_url.port or 80
    with socket.create_connection(address, 5) as one, contextlib.suppress(OSError):
        one.settimeout(2)
        one.sendall(sent)


def tiny_responses(http: httpx.Client, round: int) -> None:
    """A response of one token that the server keeps: many would evict those of others."""
    http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1})


ATTACKERS: dict[str, Callable[[httpx.Client, int], None]] = {
    "one_large_body": one_large_body,
    "sixteen_large_bodies": sixteen_large_bodies,
    "largest_that_is_read": largest_that_is_read,
    "middling": middling,
    "sixty_small": sixty_small,
    "pieces": pieces,
    "tiny_responses": tiny_responses,
}
