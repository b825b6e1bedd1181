"""Stop strings in a stream of text pieces, found wherever the pieces happen to be cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Releases text as soon as it cannot be part of a stop string any more.

    The match that ends first wins, and the longest of those that end together, so the result
    does not depend on how the text is cut. Costs O(characters × stop strings), whatever the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(s, _failures(s)) for s in stops]
        self._state = [0] * len(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text to release, the stop string that ended it or None)."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        for i in range(len(self._held), len(text)):
            matched = self._advance(text[i])
            if matched is not None:
                self._held = ""
                return text[: i + 1 - len(matched)], matched
        keep = len(text) - max(self._state)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back; for the end of the stream."""
        held, self._held = self._held, ""
        self._state = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        best: str | None = None
        for n, (stop, fail) in enumerate(self._stops):
            k = self._state[n]
            while k and stop[k] != char:
                k = fail[k - 1]
            k += stop[k] == char
            self._state[n] = k
            if k == len(stop) and (best is None or k > len(best)):
                best = stop
        return best


@lru_cache(maxsize=1024)
def _failures(pattern: str) -> tuple[int, ...]:
    """For every prefix of `pattern`, its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    k = 0
    for i in range(1, len(pattern)):
        while k and pattern[k] != pattern[i]:
            k = table[k - 1]
        k += pattern[k] == pattern[i]
        table[i] = k
    return tuple(table)
