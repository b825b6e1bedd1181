"""Tells the core what Triton compiles, by the compiler's own listener. Source: triton/knobs.py."""

from __future__ import annotations

from typing import Any

from triton import knobs

from ds_runtime.api import compiled

_SHAPE = 300  # characters


def _heard(before: Any, *, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
    if before is not None:
        before(src=src, times=times, cache_hit=cache_hit, **rest)
    if not cache_hit:
        compiled("triton", str(getattr(src, "name", "kernel")), times.total / 1e6, _shape(src))


def _shape(src: Any) -> str:
    """Types and constants of a kernel's arguments."""
    types = getattr(src, "signature", {})
    names = list(types)
    fixed = {names[at[0]]: value for at, value in getattr(src, "constants", {}).items()}
    said = ", ".join(f"{name}={fixed.get(name, kind)}" for name, kind in types.items())
    return said if len(said) <= _SHAPE else said[: _SHAPE - 3] + "..."


def _listen() -> None:
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda **told: _heard(before, **told)


if hasattr(knobs, "compilation"):  # compilers of vendors may be older
    _listen()
