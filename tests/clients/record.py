"""Recorded requests: a file of JSON lines per client, with the bytes as it sent them.

A line has the `use` it belongs to, the bytes `sent` (UTF-8; others as lone surrogates), the
`status` of the answer, and the id of the response that it `made`, where a later request names it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from relay import Sent

FOLDER = Path(__file__).parent / "recorded"
PER_USE = 6  # requests of one use to one route: benchmarks send the same many times
_VARYING = (b"host", b"x-stainless-read-timeout", b"x-request-id", b"traceparent")


class Request(NamedTuple):
    """One recorded request, in bytes, and the status that its answer had."""

    use: str
    raw: bytes
    status: int
    made: str | None


def split(raw: bytes) -> tuple[str, str, dict[bytes, bytes], bytes]:
    """Method, target, headers in small letters and the body of a request."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    method, target, _ = first.decode().split(" ")
    pairs = (line.partition(b":") for line in lines)
    return method, target, {name.lower(): value.strip() for name, _, value in pairs}, body


def worth(sent: list[Sent]) -> list[Request]:
    """What is kept: no request twice, and a few of each route for a use."""
    named = {s.made for s in sent if s.made and any(s.made.encode() in o.raw for o in sent)}
    seen, count, kept = set(), {}, []
    for one in sent:
        method, target, headers, body = split(bytes(one.raw))
        assert one.status is not None, f"{method} {target} was never answered"
        rest = tuple(sorted(h for h in headers.items() if h[0] not in _VARYING))
        place = one.use, method, re.sub(r"resp_\w+", "", target)
        made = one.made if one.made in named else None
        if made is None and (
            (method, target, rest, body) in seen or count.get(place, 0) >= PER_USE
        ):
            continue
        seen.add((method, target, rest, body))
        count[place] = count.get(place, 0) + 1
        kept.append(Request(one.use, bytes(one.raw), one.status, made))
    return kept


def write(client: str, kept: list[Request]) -> None:
    """The file of a client."""
    FOLDER.mkdir(exist_ok=True)
    lines = [json.dumps(_line(one)) + "\n" for one in kept]
    (FOLDER / f"{client}.jsonl").write_text("".join(lines))


def _line(one: Request) -> dict[str, object]:
    sent = one.raw.decode(errors="surrogateescape")
    more = {} if one.made is None else {"made": one.made}
    return {"use": one.use, "status": one.status, **more, "sent": sent}


def read(client: str) -> list[Request]:
    """The requests of a client, in their order."""
    found = []
    for line in (FOLDER / f"{client}.jsonl").read_text().splitlines():
        one = json.loads(line)
        raw = one["sent"].encode(errors="surrogateescape")
        found.append(Request(one["use"], raw, one["status"], one.get("made")))
    return found
