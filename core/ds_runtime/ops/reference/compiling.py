"""What the plugin "compiled" offers: each function compiles while `compiling` is entered, and never
else.

A call like none that was compiled then runs op by op.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from ds_runtime.errors import ConfigError, DsRuntimeError, named
from ds_runtime.ops.contract import load_attr
from ds_runtime.ops.table import OPS

_COMPILERS = ("g++", "clang++", "c++", "gcc", "clang", "cc")
_KINDS = 64  # of calls of one function: widths, dtypes and strides, by one row and by several
_now = ContextVar("compiling", default=False)


def check_compiler() -> None:
    """ConfigError if there is none: torch.compile writes C or C++ for every device."""
    by = next((name for name in ("CXX", "CC") if os.environ.get(name)), "")
    tried = (os.environ[by],) if by else _COMPILERS
    if not any(map(shutil.which, tried)):
        looked = f"{by} names {tried[0]}, which is not there" if by else "there is none"
        raise ConfigError(
            f"--enable-torch-compile: it needs a C++ compiler, and {looked}: install g++ or "
            "clang++, or leave the flag out"
        )


class Compiled:
    """A function of tensors, by rows of their first dim, through torch.compile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._name = function.__name__
        self._compile = torch.compile(function, fullgraph=True)
        self._ready = torch._dynamo.run(function)

    def __call__(self, *args: Any) -> Any:
        if not _now.get():
            return self._ready(*args)
        rows = args[0].shape[0]
        for arg in args:
            if isinstance(arg, Tensor) and arg.ndim and arg.shape[0] == rows:
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        try:
            with torch._dynamo.config.patch(recompile_limit=_KINDS):
                return self._compile(*args)
        except DsRuntimeError:
            raise
        except Exception as e:
            inner = getattr(e, "inner_exception", e)  # behind torch's own words
            said = next(line for line in named(inner).splitlines() if line.strip())
            raise ConfigError(
                f"--enable-torch-compile: {self._name} does not compile here: {said}; leave the "
                "flag out"
            ) from e


@contextmanager
def compiling() -> Iterator[None]:
    """Within, functions compile what they are called with, on this thread."""
    before = _now.set(True)
    try:
        yield
    finally:
        _now.reset(before)


check_compiler()


def __getattr__(name: str) -> Compiled:
    """Of the op of this name, made once."""
    if name not in OPS or not OPS[name].compiles:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = Compiled(load_attr(OPS[name].reference))
    return made
