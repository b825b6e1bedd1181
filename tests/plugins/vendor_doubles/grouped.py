"""What csrc/grouped.cu does, for a host: over the addresses that its launches are given.

Stands in for ds_runtime_cuda.nvrtc. What a launch does not own is left as it was.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from ds_runtime.ops.reference.activation import silu_mul
from vendor_doubles import require
from vendor_doubles.experts_streaming import (
    BF16,
    F32,
    FP8,
    I32,
    _quantised,
    at,
    box_map,
    cores,
    module,
)
from vendor_doubles.maths import spread

__all__ = ["box_map", "cores", "launch", "module"]


def launch(function, grid, threads: int, shared: int, a: ctypes.Structure) -> None:
    name, defines, room = function
    require(room == shared == defines["BYTES"] and threads == 384, "as it was prepared")
    require(ctypes.sizeof(a) == defines["ARGS"] and grid == (132, 1), "a launch")
    require(0 < a.experts <= 512 and a.columns % 256 == 0 == a.k % 128, "whole units")
    require(at(a.next, I32, 1).item() == 0, "a counter that begins at 0")
    at(a.next, I32, 1).fill_(1)
    write = {"gate_up": _gate_up, "down": _down}[name]
    begin, weights, x = 0, _weights(a), _rows(a)
    for expert, end in enumerate(at(a.ends, I32, a.experts).tolist()):
        require(begin <= end <= len(x) and end % 4 == 0, "rows in order, scales at 16 bytes")
        if end > begin:
            write(a, begin, end, x[begin:end] @ weights[expert].T)
        begin = end


def _rows(a) -> Tensor:
    address, rows, columns, size, box, *_ = a.maps[:16]
    require((columns, size, box) == (a.k, 1, 64), "codes of rows, half a unit at a time")
    require(a.pitch >= rows and a.pitch % 4 == 0 == a.x_scale % 16, "columns of scales")
    scale = at(a.x_scale, F32, a.k // 128, a.pitch)[:, :rows].T
    return at(address, FP8, rows, columns).float() * scale.repeat_interleave(128, 1)


def _weights(a) -> Tensor:
    address, rows, columns, size, box, *_ = a.maps[16:32]
    whole = (a.experts * a.columns, a.k, 1, 128)
    require((rows, columns, size, box) == whole, "all experts' rows, a block at a time")
    values = at(address, FP8, a.experts, a.columns, a.k)
    scale = at(a.w_scale, F32, a.experts, a.columns // 128, a.k // 128)
    return spread(values, scale, 128, 128).float()


def _gate_up(a, begin: int, end: int, made: Tensor) -> None:
    codes, scale = _quantised(silu_mul(made.to(BF16)), a.powers)
    at(a.out, FP8, end, a.columns // 2)[begin:] = codes
    at(a.out_scale, F32, a.columns // 256, a.pitch)[:, begin:end] = scale.T


def _down(a, begin: int, end: int, made: Tensor) -> None:
    at(a.out, BF16, end, a.columns)[begin:] = made.to(BF16)
