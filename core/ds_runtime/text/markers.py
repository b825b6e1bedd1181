"""Marker strings in text that comes in pieces, in the spellings that models have been seen to use.

Canonical markers are written with full-width bars `｜` and `▁`. Accepted instead: ASCII bars,
doubled bars and `‖`, and `_` or a space for `▁`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BARS = re.compile("[|｜‖]{1,2}")
_UNMISTAKABLE = re.compile("</?｜.+|</?[^｜]{4,}")  # unfinished markers that can be nothing else
_BLANKS = str.maketrans({"_": "▁", " ": "▁"})


def canonical(text: str) -> str:
    """`text` in the canonical spelling."""
    return _BARS.sub("｜", text).translate(_BLANKS)


class Markers:
    """A set of markers, each beginning with `<` and holding no other `<`."""

    def __init__(self, markers: Sequence[str]) -> None:
        self.names = tuple(markers)
        self._known = tuple(canonical(m) for m in markers)
        self._kinds = dict(zip(self._known, markers, strict=True))
        self._longest = 2 * max(map(len, markers))  # every bar may be doubled
        patterns = (re.escape(m) for m in sorted(self._known, key=len, reverse=True))
        spelled = "|".join(p.replace("｜", "[|｜‖]{1,2}").replace("▁", "[▁_ ]") for p in patterns)
        self._pattern = re.compile(spelled)

    def find(self, text: str, pos: int = 0) -> tuple[int, int, str] | None:
        """(start, end, canonical marker) of the first marker from `pos` on, or None."""
        match = self._pattern.search(text, pos)
        if match is None:
            return None
        return match.start(), match.end(), self._kinds[canonical(match.group())]

    def held(self, text: str, pos: int = 0) -> int:
        """Where an unfinished marker may begin at the end of `text`; its length if nowhere."""
        start = text.rfind("<", max(pos, len(text) - self._longest))
        if start >= 0:
            tail = canonical(text[start:])
            if any(m.startswith(tail) for m in self._known):
                return start
        return len(text)

    def release(self, rest: str) -> str:
        """`rest` at the end of the stream, less an unfinished marker that can be nothing else."""
        start = self.held(rest)
        return rest[:start] if _UNMISTAKABLE.fullmatch(canonical(rest[start:])) else rest
