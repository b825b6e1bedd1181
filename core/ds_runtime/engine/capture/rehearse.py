"""A run of the first steps before they count, in which kernels are compiled side by side.

A kernel that compiles when it first runs keeps all others waiting. In a rehearsal launches of such
kernels return at once, and leaving it waits until all have been compiled; whatever else a step
does is done, over zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.contract import load_attr


@contextmanager
def rehearsing(bound: BoundOps) -> Iterator[bool]:
    """Whether there is anything to rehearse: contexts that bound kernels name, and that work."""
    paths = sorted({k.compiles.rehearsal for k, _ in bound.kernels() if k.compiles.rehearsal})
    with ExitStack() as stack:
        works = [stack.enter_context(load_attr(path)()) for path in paths]
        yield any(works)


class Rehearsed:
    """GraphBackend that records nothing: what is captured has run, which is all that is wanted."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend."""
        return run
