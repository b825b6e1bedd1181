"""Marker strings in text that comes in pieces, in the spellings that models have been seen to use.

Canonical markers are written with full-width bars `｜` and `▁`. Lenient spellings have ASCII bars,
doubled bars or `‖`, and `_` or a space for `▁`. They are other models' markers, too, and what
people write of markers: they count only inside calls that began canonically. Whoever looks for a
marker says with `loose` whether he is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_BARS = re.compile("[|｜‖]{1,2}")
_UNMISTAKABLE = re.compile("</?｜.+|</?[^｜]{4,}")  # unfinished markers that can be nothing else
_BLANKS = str.maketrans({"_": "▁", " ": "▁"})


def canonical(text: str) -> str:
    """`text` in the canonical spelling."""
    return _BARS.sub("｜", text).translate(_BLANKS)


class Found(NamedTuple):
    """A marker in a text: where, which one, and whether it is spelled canonically."""

    start: int
    end: int
    name: str
    exact: bool


class Markers:
    """A set of markers, each beginning with `<` and holding no other `<`."""

    def __init__(self, markers: Sequence[str]) -> None:
        self.names = tuple(markers)
        self._known = tuple(canonical(m) for m in markers)
        self._kinds = dict(zip(self._known, markers, strict=True))
        self._longest = 2 * max(map(len, markers))  # every bar may be doubled
        by_length = sorted(markers, key=len, reverse=True)
        self._exact = re.compile("|".join(map(re.escape, by_length)))
        patterns = (re.escape(canonical(m)) for m in by_length)
        spelled = "|".join(p.replace("｜", "[|｜‖]{1,2}").replace("▁", "[▁_ ]") for p in patterns)
        self._loose = re.compile(spelled)

    def find(self, text: str, pos: int = 0, loose: bool = False) -> Found | None:
        """The first marker from `pos` on, or None."""
        return self._found((self._loose if loose else self._exact).search(text, pos))

    def at(self, text: str, pos: int, loose: bool = False) -> Found | None:
        """The marker that is at `pos`, or None."""
        return self._found((self._loose if loose else self._exact).match(text, pos))

    def _found(self, match: re.Match[str] | None) -> Found | None:
        if match is None:
            return None
        name = self._kinds[canonical(match.group())]
        return Found(match.start(), match.end(), name, match.group() == name)

    def held(self, text: str, pos: int = 0, loose: bool = False) -> int:
        """Where an unfinished marker may begin at the end of `text`; its length if nowhere."""
        start = text.rfind("<", max(pos, len(text) - self._longest))
        return start if start >= 0 and self.unfinished(text, start, loose) else len(text)

    def unfinished(self, text: str, pos: int, loose: bool = False) -> bool:
        """Whether all that `text` has from `pos` on is the beginning of a marker."""
        if len(text) - pos > self._longest:
            return False
        tail = canonical(text[pos:]) if loose else text[pos:]
        return any(m.startswith(tail) for m in (self._known if loose else self.names))

    def release(self, rest: str, loose: bool = False) -> str:
        """`rest` at the end of the stream, less an unfinished marker that can be nothing else."""
        start = self.held(rest, loose=loose)
        return rest[:start] if _UNMISTAKABLE.fullmatch(canonical(rest[start:])) else rest
