"""What every kernel that is launched begins with, and how it is launched.

Where configs/<arch>/launch.json says PDL, a kernel may be launched before the one in front of it
has ended (programmatic dependent launch): its programs take the places that become free, and wait
for the other's writes. Every kernel waits before it writes, or reads anything but weights, so that
the end of one is the end of all before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import triton
import triton.language as tl

import ds_runtime_triton.jit.heard  # noqa: F401 - tells what is compiled
from ds_runtime_triton.config import tuned
from ds_runtime_triton.machine import architecture

_only_compiled = ContextVar("only_compiled", default=False)


@cache
def _options() -> dict[str, Any]:
    """What each launch on this device has beside the kernel's own arguments."""
    overlapping = tuned(architecture(), "launch").at(1)["PDL"]
    return {"PDL": 1, "launch_pdl": True} if overlapping else {"PDL": 0}


class Entry:
    """A kernel as it is launched: kernel[grid](arguments of its own, …)."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.__doc__ = fn.__doc__
        self.fn = fn
        self.compiled = triton.jit(fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if _only_compiled.get():
            return partial(self.compiled.run, grid=grid, warmup=True, **_options())
        return partial(self.compiled[grid], **_options())


@contextmanager
def compiling() -> Iterator[None]:
    """Launches compile kernels and do not run them: those of this thread."""
    before = _only_compiled.set(True)
    try:
        yield
    finally:
        _only_compiled.reset(before)


def entry(fn: Callable[..., Any]) -> Entry:
    """A kernel whose last parameter is PDL and whose first statement is follow(PDL)."""
    return Entry(fn)


@triton.jit
def follow(PDL: tl.constexpr):
    """Let the next kernel start when it finds room, and wait for the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
