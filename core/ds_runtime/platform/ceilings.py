"""The rates that a device reaches, measured with torch alone: memory reads, matmuls per dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

_SECONDS = 0.6  # per figure
_BUFFER = 2 << 30  # bytes, unless the last-level cache asks for more or memory for less
_SIZES = (2048, 4096, 8192)  # of square matmuls; the larger only where the last took no time
_FLOATS = ("float32", "bfloat16", "float16")


def read_rate(device: torch.device, wait: Callable[[], None], free: int) -> float:
    """Bytes per second of the fastest reading of a short while; of `free` bytes it takes a quarter
    at most."""
    return bandwidth(device, wait, buffer_bytes(cache_bytes(device), free))


def buffer_bytes(cache: int, free: int) -> int:
    """Bytes to read so that nothing of them stays in a cache of that size."""
    return max(1 << 20, min(max(_BUFFER, 4 * cache), free // 4))


def cache_bytes(device: torch.device) -> int:
    """The last-level cache as torch knows it; 0 where it does not."""
    if device.type == "cpu":
        return 0
    try:
        found = torch.get_device_module(device).get_device_properties(device)
    except (AttributeError, RuntimeError, AssertionError):
        return 0
    return int(getattr(found, "L2_cache_size", 0))


def bandwidth(device: torch.device, wait: Callable[[], None], nbytes: int) -> float:
    """Bytes per second of reductions that read a buffer and write next to nothing."""
    rows = torch.ones(max(1, nbytes // (4 << 20)), 1 << 20, device=device)
    sums = torch.empty(rows.shape[0], device=device)
    seconds = best(lambda: torch.sum(rows, dim=1, out=sums), wait)
    return rows.nbytes / seconds


def compute(
    device: torch.device, wait: Callable[[], None], fast: frozenset[str]
) -> Mapping[str, float]:
    """Operations per second by dtype: the fast floats, and int8 and FP8 where torch has them."""
    found: dict[str, float] = {}
    for name in _FLOATS:
        if name in fast:
            found[name] = _largest(partial(_matmul, getattr(torch, name), device), wait)
    for name, make in (("int8", _int8), ("float8_e4m3fn", _fp8)):
        try:
            found[name] = _largest(partial(make, device), wait)
        except (RuntimeError, AttributeError, NotImplementedError, ValueError):
            continue  # torch has no such matmul for this device
    return found


def _largest(make: Callable[[int], Callable[[], Any]], wait: Callable[[], None]) -> float:
    """The best rate over sizes; larger ones are left out where one call takes long."""
    rate = 0.0
    for n in _SIZES:
        seconds = best(make(n), wait)
        rate = max(rate, 2.0 * n**3 / seconds)
        if seconds > _SECONDS / 16:
            break
    return rate


def _matmul(dtype: torch.dtype, device: torch.device, n: int) -> Callable[[], Any]:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, dtype=dtype, device=device)
    return lambda: torch.mm(a, b.T, out=out)


def _int8(device: torch.device, n: int) -> Callable[[], Any]:
    a, b = (torch.randint(-127, 128, (n, n), device=device).to(torch.int8) for _ in range(2))
    return lambda: torch._int_mm(a, b.T)


def _fp8(device: torch.device, n: int) -> Callable[[], Any]:
    if device.type == "cpu":
        raise NotImplementedError("torch emulates it there")
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)


def best(call: Callable[[], Any], wait: Callable[[], None], seconds: float | None = None) -> float:
    """Seconds of the fastest call."""
    return min(timed(call, wait, seconds))


def timed(
    call: Callable[[], Any], wait: Callable[[], None], seconds: float | None = None
) -> list[float]:
    """Seconds of a call, again and again; calls are queued in groups where one is short."""
    call()
    wait()
    group, found = 1, list[float]()
    end = time.perf_counter() + (_SECONDS if seconds is None else seconds)
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(group):
            call()
        wait()
        spent = time.perf_counter() - start
        found.append(spent / group)
        if spent < 0.01:
            group *= 2
    return found
