"""Sums over ranks that overlap the compute queued after them.

A step in two halves has something to compute while a sum of the other half travels. Within
`overlapping` the sums of attention and FFNs start where they are due, and are waited for where they
are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_overlaps: ContextVar[bool] = ContextVar("overlapping", default=False)


class Started:
    """A sum [rows, width] that is under way. Every rank has one, and uses it alike, once."""

    __slots__ = ("_end", "shape")

    def __init__(self, end: Callable[[], Tensor], shape: torch.Size) -> None:
        self._end, self.shape = end, shape

    def __getitem__(self, rows: Tensor) -> Started:
        """Those rows."""
        end = self._end
        return Started(lambda: end()[rows], torch.Size((rows.shape[0], *self.shape[1:])))

    def summed(self) -> Tensor:
        """Wait for it."""
        return self._end()


def ended(x: Tensor | Started) -> Tensor:
    """The sum, waited for where it is under way."""
    return x.summed() if isinstance(x, Started) else x


@contextmanager
def overlapping() -> Iterator[None]:
    """Sums of attention and FFNs are started within."""
    before = _overlaps.set(True)
    try:
        yield
    finally:
        _overlaps.reset(before)


def is_overlapping() -> bool:
    """Whether sums are started."""
    return _overlaps.get()
