"""Work of a step that need not wait for what is queued after it.

A capture may record it on a side stream, so that the device has something to read while small
kernels wait for each other. Everywhere else it runs where its result is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

_Made = TypeVar("_Made")
Fork = Callable[[Callable[[], Any]], Callable[[], Any]]

_fork: ContextVar[Fork | None] = ContextVar("fork", default=None)


def branch(work: Callable[[], _Made]) -> Callable[[], _Made]:
    """Returns a function that returns the result of `work`. Call it once, in the same capture.

    `work` reads nothing that is queued from here on until then, and writes nothing that is read by
    it; it may run now or then.
    """
    fork = _fork.get()
    return work if fork is None else fork(work)


@contextmanager
def branching(fork: Fork) -> Iterator[None]:
    """Branches are what `fork` makes of them: in a capture."""
    before = _fork.set(fork)
    try:
        yield
    finally:
        _fork.reset(before)
