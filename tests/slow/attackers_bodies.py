"""Clients that send bodies meant to stop a server: large, deeply or widely nested, many at once.

Each is called with a base URL and an event, and goes on until that is set. What the server answers
is not looked at: it may refuse, but must go on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial

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


def _send(url: str, stop: threading.Event, sent: list[tuple[str, bytes]]) -> None:
    with httpx.Client(base_url=url, timeout=60, headers=_JSON) as http:
        while not stop.is_set():
            for path, body in sent:
                with contextlib.suppress(httpx.HTTPError):
                    http.post(path, content=body)
                if stop.is_set():
                    return


def _together(url: str, stop: threading.Event, sent: list[tuple[str, bytes]], count: int) -> None:
    """So many clients, each of which begins with another body."""
    turned = [sent[n % len(sent) :] + sent[: n % len(sent)] for n in range(count)]
    threads = [threading.Thread(target=_send, args=(url, stop, one)) for one in turned]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def one_large_body(url: str, stop: threading.Event) -> None:
    """16 MB of nested lists, again and again, from one client."""
    _send(url, stop, [("/v1/chat/completions", _nested(_ABOUT))])


def sixteen_large_bodies(url: str, stop: threading.Event) -> None:
    """16 MB of all kinds from sixteen clients at once."""
    _together(url, stop, list(bodies(_ABOUT).values()), 16)


def _of_size(size: int, count: int, url: str, stop: threading.Event) -> None:
    _together(url, stop, list(bodies(size).values()), count)


largest_that_is_read = partial(_of_size, 900_000, 16)
"""Sixteen clients with bodies just below what any context may need."""

middling = partial(_of_size, 190_000, 16)
"""Sixteen clients with bodies that several threads may work on."""


def tiny_responses(url: str, stop: threading.Event) -> None:
    """Responses of one token that the server keeps: they would evict those of others."""
    with httpx.Client(base_url=url, timeout=60, headers=_JSON) as http:
        while not stop.is_set():
            with contextlib.suppress(httpx.HTTPError):
                http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1})


ATTACKERS: dict[str, Callable[[str, threading.Event], None]] = {
    "one_large_body": one_large_body,
    "sixteen_large_bodies": sixteen_large_bodies,
    "largest_that_is_read": largest_that_is_read,
    "middling": middling,
    "tiny_responses": tiny_responses,
}
