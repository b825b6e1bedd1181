"""How deep JSON is nested, told from its bytes: what reads or writes it recurses."""

from __future__ import annotations

import re

import numpy as np

MAX_NESTING = 256  # levels
_NAMED = 3  # levels of a field's name
_SEARCHED = 1 << 18  # bytes in which the name is looked for
_CHUNK = 1 << 18  # bytes that are looked at without a break
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*+)"(\s*+:)?|[][{}]')
_STEP = np.zeros(256, np.int8)
_STEP[[*b"[{"]], _STEP[[*b"]}"]] = 1, -1


def too_deep(raw: bytes) -> str | None:
    """The field, such as `text.format.schema`, in which JSON has more than MAX_NESTING levels.

    It is "" where that is no field of an object, or far from the beginning; None: nothing is as
    deep.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING or (end := _first(raw)) is None:
        return None
    depth, names = 0, list[bytes]()  # of the objects around, as far as they are the outermost
    for token in _TOKEN.finditer(raw, 0, end) if end <= _SEARCHED else ():
        kind = token[0][:1]
        if kind == b'"':
            if token[2] is not None and depth <= _NAMED and len(names) >= depth - 1:
                names[depth - 1 :] = [token[1]]
        elif kind in b"[{":
            depth += 1
        else:
            depth -= 1
            del names[max(depth, 0) :]
    return b".".join(names).decode(errors="replace")[:200]


def _first(raw: bytes) -> int | None:
    """Where the first bracket beyond MAX_NESTING stands."""
    text = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in raw else raw
    depth = quotes = 0
    for begin in range(0, len(text), _CHUNK):
        chunk = np.frombuffer(text, np.uint8, min(_CHUNK, len(text) - begin), begin)
        parity = np.cumsum(chunk == ord('"'), dtype=np.int32) + quotes
        depths = np.cumsum(np.where(parity & 1, 0, _STEP[chunk]), dtype=np.int32) + depth
        if depths.max() > MAX_NESTING:
            return begin + int(np.argmax(depths > MAX_NESTING))
        depth, quotes = int(depths[-1]), int(parity[-1])
    return None
