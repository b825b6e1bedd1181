"""Kernels that are compiled side by side, in threads, before any of them runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs

from ds_runtime.api import cores_per_device
from ds_runtime_triton.jit.entry import compiling

_MOST_THREADS = 12  # each has a compiler's memory; tracing a kernel holds the interpreter's lock
_EMPTY = (
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    Tensor.new_empty,
    Tensor.new_empty_strided,
)


class _Zeroed(TorchFunctionMode):
    """Results that no kernel writes are zeros: whatever does run finds ids and places in range.

    Not a TorchDispatchMode: its first use imports 800 modules.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY and isinstance(made, Tensor):
            made.zero_()
        return made


class _Compilers(ThreadPoolExecutor):
    """Threads that leave what they compile ready for its first launch."""

    def __init__(self, threads: int) -> None:
        active = triton.runtime.driver.active
        choose = getattr(active, "set_current_device", None)  # not every device's driver has it
        here = active.get_current_device() if choose else None
        super().__init__(threads, initializer=partial(choose, here) if choose else None)

    def submit(self, compile: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_ready, compile, *args, **kwargs)


def _ready(compile: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A kernel on the device, with the launcher that a C compiler makes for it."""
    kernel = compile(*args, **kwargs)
    try:
        _ = kernel.run
    except Exception:  # what the device refuses says so when it is first run
        if kernel.module is None:  # a launcher would be kept that has nothing to launch
            kernel._run = None
    return kernel


@contextmanager
def rehearsal() -> Iterator[bool]:
    """`Compiles.rehearsal`: launches are compiled and not run; leaving waits for all of them."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or knobs.runtime.interpret:
        yield False
        return
    # What does not compile says so when it is first run, in its place.
    lenient = "ignore_errors" in inspect.signature(mode).parameters
    options = {"ignore_errors": True} if lenient else {}
    threads = max(1, min(_MOST_THREADS, cores_per_device() - 1))
    with _Compilers(threads) as pool, mode(pool, **options), compiling(), _Zeroed():
        yield True
