"""The one vendor package that this plugin calls."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

NZ = 29  # the fractal format of weights: FRACTAL_NZ


@cache
def _library() -> Any:
    return import_module("torch_npu")


def npu() -> Any:
    """torch_npu, whose functions are the ops."""
    return _library()
