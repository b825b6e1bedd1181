"""What a prefix cache of unlimited memory could serve of a trace. Knows nothing of any server.

    python trace_bound.py FILE

Each line of FILE is a request, in the order of sending:

    {"prompt": ids, "answer": ids, "cached": tokens, "warmup": bool}

`cached` tokens came from the server's cache; null: it does not say. `warmup`: it was sent before
the measurement. A prompt's bound is its longest common beginning, in token ids, with any earlier
prompt followed by its answer. Warm-ups are earlier prompts and count no further.
"""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

_BYTES = 4  # of an id


class Known:
    """Sequences of ids that were seen, in the order of a dictionary: the one with the longest
    common beginning is next to where another belongs."""

    def __init__(self) -> None:
        self.tokens = 0  # that memory holds where common beginnings are kept once
        self._sorted: list[bytes] = []

    def common(self, ids: Sequence[int]) -> int:
        """The longest beginning of `ids` that any sequence has as well, in tokens."""
        return self._find(_packed(ids))[1]

    def add(self, ids: Sequence[int]) -> None:
        """It was seen."""
        word = _packed(ids)
        place, common = self._find(word)
        self.tokens += len(ids) - common
        self._sorted.insert(place, word)

    def _find(self, word: bytes) -> tuple[int, int]:
        place = bisect_left(self._sorted, word)
        beside = self._sorted[max(0, place - 1) : place + 1]
        return place, max((_common(word, other) for other in beside), default=0)


def _packed(ids: Sequence[int]) -> bytes:
    """As bytes whose order is that of the ids."""
    packed = array("I", ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Tokens of the common beginning."""
    low, high = 0, min(len(one), len(other)) // _BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * _BYTES] == other[: middle * _BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def bounds(requests: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[list[int], int]:
    """For (prompt, answer) in the order of sending: each prompt's bound, and the tokens that
    unlimited memory holds after the last one."""
    known, out = Known(), []
    for prompt, answer in requests:
        out.append(known.common(prompt))
        known.add([*prompt, *answer])
    return out, known.tokens


def main(path: str) -> int:
    """Print the sums of a file."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    found, tokens = bounds((row["prompt"], row["answer"]) for row in rows)
    counted = [(row, most) for row, most in zip(rows, found, strict=True) if not row.get("warmup")]
    cached = [row.get("cached") for row, _ in counted]
    report = {
        "requests": len(counted),
        "prompt_tokens": sum(len(row["prompt"]) for row, _ in counted),
        "bound_tokens": sum(most for _, most in counted),
        "cached_tokens": None if None in cached else sum(cached),
        "held_tokens": tokens,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit((__doc__ or "").strip())
    sys.exit(main(sys.argv[1]))
