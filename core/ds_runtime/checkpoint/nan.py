"""NaN among stored numbers: found by the host right after the copy, while the bytes are in the
caches, or by the device that they were sent to.

Of every format the NaN are the numbers whose bits, without the sign, lie above those of infinity,
or of the largest number where there is none. As signed integers the positive ones are then above
all others, and as unsigned integers the negative ones. Two maxima find either, at the speed at
which the caches are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.checkpoint.tensors import DTYPES

Bytes = npt.NDArray[np.uint8]

PIECE = 1 << 21  # bytes that are looked at together: the caches hold them since they were copied


class FloatKind(NamedTuple):
    """How a float dtype is looked at: (integers of its size, the largest that is no NaN) each."""

    size: int
    views: tuple[tuple[np.dtype[Any], int], ...]


def _kind(size: int, last: int) -> FloatKind:
    """last: the bits of the largest number, or of infinity."""
    pairs = (("i", last), ("u", last | 1 << (8 * size - 1)))
    return FloatKind(size, tuple((np.dtype(f"<{sign}{size}"), most) for sign, most in pairs))


KINDS: Mapping[str, FloatKind] = {  # by the names of safetensors; others have no NaN
    "F64": _kind(8, 0x7FF0_0000_0000_0000),
    "F32": _kind(4, 0x7F80_0000),
    "F16": _kind(2, 0x7C00),
    "BF16": _kind(2, 0x7F80),
    "F8_E4M3": _kind(1, 0x7E),
    "F8_E5M2": _kind(1, 0x7C),
    "F8_E8M0": FloatKind(1, ((np.dtype("u1"), 0xFE),)),  # has no sign
}
_highest = np.maximum.reduce


def first_nan(kind: FloatKind, data: Bytes) -> int | None:
    """The number of the first NaN among whole elements; None if there is none."""
    if not len(data):
        return None
    found = [
        int(np.argmax(values > most))
        for dtype, most in kind.views
        if _highest(values := data.view(dtype)) > most
    ]
    return min(found, default=None)


_NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})  # that torch itself looks at


def any_nan(dtype: str, data: Tensor) -> Tensor:
    """Whether there is NaN among whole elements of a dtype of `KINDS`: a bool [] on the device of
    their bytes, data [n] uint8. Nothing waits for it."""
    if dtype in _NUMBERS:
        if data.storage_offset() % KINDS[dtype].size:
            data = data.clone()
        return torch.isnan(data.view(DTYPES[dtype])).any()
    if dtype == "F8_E8M0":
        return (data == 0xFF).any()
    return ((data & 0x7F) > (0x7C if dtype == "F8_E5M2" else 0x7E)).any()
