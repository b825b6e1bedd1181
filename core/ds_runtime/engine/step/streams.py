"""The random numbers of requests: of a seed and a choice a stream, of a position a number of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """splitmix64's finaliser: a bijection of 64 bits in which every bit depends on every other."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same of arrays, whose products wrap at 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_key(seed: int, choice: int) -> int:
    """The 64-bit key of one choice's random numbers."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (choice + 1) * _GOLDEN) & _MASK)


def uniforms(keys: Sequence[int], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The numbers in [0, 1) of streams `keys` [n] at positions [n, …], with 53 random bits."""
    streams = np.array(keys, np.uint64).reshape(-1, *(1,) * (positions.ndim - 1))
    mixed = _mixed(streams + (positions + 1).astype(np.uint64) * np.uint64(_GOLDEN))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
