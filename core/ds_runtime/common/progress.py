"""Progress of long work: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TextIO

_BAR = 24
_BAR_SECONDS = 0.1
_LINE_SECONDS = 5.0


_hearer: ContextVar[Callable[[], None] | None] = ContextVar("hearer", default=None)


@contextmanager
def heard(by: Callable[[], None]) -> Iterator[None]:
    """Within, `by` is called at every `advance`, from the thread that advances. What it raises ends
    the work."""
    token = _hearer.set(by)
    try:
        yield
    finally:
        _hearer.reset(token)


class Progress:
    """Counts towards `total` and shows amount and rate on standard error.

    Use as a context manager and call `advance`. unit "B" prints bytes with decimal prefixes, any
    other unit plain numbers. `enabled` False counts in silence (ranks other than 0). Work shorter
    than a few seconds prints a single line where there is no terminal.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str = "B",
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled
        self._terminal = self._stream.isatty()
        self._hear = _hearer.get()  # threads that advance have a context of their own
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> Progress:
        self._start = self._shown = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if not self._enabled:
            return
        if self._terminal:
            self._bar()
            print(file=self._stream, flush=True)
        elif kind is None:
            self._line()

    def advance(self, amount: int) -> None:
        """`amount` more is done."""
        self.done += amount
        if self._hear is not None:
            self._hear()
        if not self._enabled:
            return
        now = time.monotonic()
        if now - self._shown >= (_BAR_SECONDS if self._terminal else _LINE_SECONDS):
            self._shown = now
            if self._terminal:
                self._bar()
            else:
                self._line()

    def _amounts(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-3)
        done, total = amount(self.done, self.unit), amount(self.total, self.unit)
        return f"{done} of {total}, {amount(self.done / seconds, self.unit)}/s"

    def _bar(self) -> None:
        share = min(1.0, self.done / self.total) if self.total else 1.0
        full = round(share * _BAR)
        bar = "█" * full + "·" * (_BAR - full)
        line = f"\r{self.label} {bar} {self._amounts()}\x1b[K"
        print(line, end="", file=self._stream, flush=True)

    def _line(self) -> None:
        print(f"{self.label}: {self._amounts()}", file=self._stream, flush=True)


def amount(value: float, unit: str = "B") -> str:
    """`1.5 GB` for bytes, `1500 pages` for other units (rates under 10 keep one digit)."""
    if unit != "B":
        whole = value >= 10 or value == int(value)
        return f"{value:.0f} {unit}" if whole else f"{value:.1f} {unit}"
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.0f} B" if not prefix else f"{value:.1f} {prefix}B"
        value /= 1000
    return f"{value:.1f} TB"
