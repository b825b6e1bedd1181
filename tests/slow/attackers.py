"""Hostile clients, one entry each, and an honest one whose gaps tell what they cost it.

python attackers.py attack URL NAME…    one thread each; a line per round, until it is ended
python attackers.py honest URL SECONDS  streams; prints the gaps between tokens, in seconds
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import attackers_bodies
import attackers_templates
import httpx

AMBIGUOUS = 'root ::= x x x x\nx ::= x x | [a-z] | [a-z] [a-z] | ""\n'
STEEP = """root ::= x x x x x x x x
x ::= y y
y ::= y y | z | ""
z ::= z z | [-a-z =*_.#/] | [-a-z =*_.#/] [-a-z =*_.#/] | ""
"""


def chat(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def plain(http: httpx.Client, round: int) -> None:
    """No attack: what an equal number of usual requests costs."""
    http.post("/v1/chat/completions", json=chat(f"Hi {round}", max_tokens=200))


def ambiguous_grammar(http: httpx.Client, round: int) -> None:
    """Masks whose cost grows with every token."""
    http.post("/v1/chat/completions", json=chat(ebnf=AMBIGUOUS, max_tokens=400, temperature=1.0))


def ambiguous_grammars(http: httpx.Client, round: int) -> None:
    """Several of them at once, each another rule, one dearer with each token than the first."""
    grammars = [f"{AMBIGUOUS}y ::= [{letter}]\n" for letter in "abcd"]
    grammars += [f"{STEEP}w ::= [{letter}]\n" for letter in "abcd"]
    together(http, [chat(ebnf=g, max_tokens=400, temperature=1.0) for g in grammars])


def abandoned_schemas(http: httpx.Client, round: int) -> None:
    """Small schemas that take long to compile, asked for by clients that leave at once."""
    for number in range(60):
        leave(http, "/v1/chat/completions", chat(json_schema=slow_schema(f"{round}_{number}")))
        time.sleep(0.005)  # a flood of connections is another matter


def slow_schema(name: str) -> dict[str, Any]:
    """A third of a second, to find that it cannot be followed."""
    return {
        "allOf": [
            {
                "anyOf": [
                    {"type": "object", "properties": {f"{name}_{i}_{j}": {"type": "integer"}}}
                    for i in range(4)
                ]
            }
            for j in range(5)
        ]
    }


def many_choices_of_a_large_schema(http: httpx.Client, round: int) -> None:
    """One rule of many characters for as many choices as fit."""
    words = [f"word {round} {i}" for i in range(800)]
    schema = {"type": "array", "items": {"enum": words}, "description": "x" * 200_000}
    http.post("/v1/chat/completions", json=chat(json_schema=schema, n=512, max_tokens=1))


ATTACKERS: dict[str, Callable[[httpx.Client, int], None]] = {
    "ambiguous_grammar": ambiguous_grammar,
    "ambiguous_grammars": ambiguous_grammars,
    "abandoned_schemas": abandoned_schemas,
    "many_choices_of_a_large_schema": many_choices_of_a_large_schema,
    **attackers_bodies.ATTACKERS,
    "endless_template": attackers_templates.endless_template,
}


def together(http: httpx.Client, bodies: list[dict[str, Any]]) -> None:
    """Chats at once, to their ends."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        for _ in pool.map(lambda body: http.post("/v1/chat/completions", json=body), bodies):
            pass


def leave(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Send a request and close the connection before its answer."""
    address = http.base_url
    connection = http_connection(str(address))
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    connection.close()


def http_connection(url: str, source: str = "127.0.0.1") -> http.client.HTTPConnection:
    """To a server on this machine, from one of its addresses."""
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=300, source_address=(source, 0))


def attack(url: str, names: list[str]) -> None:
    """Every named attack at once, round after round. Elsewhere they would have a machine of their
    own: here they leave the server its cores."""
    os.nice(19)
    threads = [threading.Thread(target=_rounds, args=(url, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _rounds(url: str, name: str) -> None:
    one = plain if name == "plain" else ATTACKERS[name]
    with httpx.Client(base_url=url, timeout=120) as client:
        round = 0
        while True:
            try:
                one(client, round)
            except Exception:
                traceback.print_exc()
                os._exit(1)  # who tests must hear of it
            round += 1
            print(name, flush=True)
            time.sleep(0.01)


def honest(url: str, seconds: float, more: dict[str, Any]) -> Iterator[float]:
    """Gaps between the tokens of streams that follow each other, at least so long."""
    end = time.perf_counter() + seconds
    connection = http_connection(url)
    body = chat("Count", max_tokens=400, stream=True, ignore_eos=True) | more
    while time.perf_counter() < end:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        last = None
        for line in reply:
            if line.startswith(b"data: {"):
                assert b'"error"' not in line, line
                now = time.perf_counter()
                if last is not None:
                    yield now - last
                last = now
    connection.close()


if __name__ == "__main__":
    if sys.argv[1] == "attack":
        attack(sys.argv[2], sys.argv[3:])
    else:
        more = json.loads(sys.argv[4]) if sys.argv[4:] else {}
        print(json.dumps(list(honest(sys.argv[2], float(sys.argv[3]), more))))
