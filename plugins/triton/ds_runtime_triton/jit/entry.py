"""What every kernel that is launched begins with, and how it is launched.

Where configs/<arch>/launch.json says PDL, a kernel may be launched before the one in front of it
has ended (programmatic dependent launch). Its programs take the places that become free, and wait
for the other's writes. Every kernel waits before it writes, or reads anything but weights, so that
the end of one is the end of all before it.
"""

from __future__ import annotations

import inspect
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

# A kernel is compiled anew where an integer is 1 or a multiple of 16 and was not before, and where
# a tensor begins at a multiple of 16 bytes and did not. Arguments of these names follow the shape
# of a step: one compilation serves all. All others are the same for every step of a model.
_COUNTS = frozenset(
    [
        "tokens",
        "pairs",
        "rows",
        "M",
        "size",
        "count",
        "splits",
        "chunks",
        "top_n",
        "x_step",
        "stride_scale_group",
        "table_row",
        "source_row",
        "target_row",
        "lse_token_a",
        "lse_head_a",
        "lse_token_b",
        "lse_head_b",
    ]
)
_SLICES = frozenset(
    [
        "positions",
        "slots",
        "table",
        "page_table",
        "starts",
        "cu",
        "q_cu",
        "k_cu",
        "owner",
        "owners",
        "lens",
        "bits",
        "adapters",
        "sources",
        "targets",
        "which",
        "temperatures",
        "top_ks",
        "top_ps",
        "min_ps",
        "uniforms",
        "lse_a",
        "lse_b",
    ]
)
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
        names = list(inspect.signature(fn).parameters)
        self.compiled = triton.jit(
            fn,
            do_not_specialize=[name for name in names if name in _COUNTS],
            do_not_specialize_on_alignment=[name for name in names if name in _SLICES],
        )

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
