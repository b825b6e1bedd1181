"""What csrc/fp8_few.cu does, for a host: over the addresses that its launches are given. Stands in
for ds_runtime_cuda.nvrtc."""

from __future__ import annotations

import ctypes

import torch

from vendor_doubles import require
from vendor_doubles.experts_streaming import BF16, F32, FP8, at, cores, module
from vendor_doubles.maths import spread

__all__ = ["cores", "launch", "module"]


def launch(function, grid, threads: int, shared: int, a: ctypes.Structure) -> None:
    name, defines, room = function
    require(name == "fp8_few" and ctypes.sizeof(a) == defines["ARGS"], "as it was prepared")
    require(shared <= room == 232_448, "sums and tokens on chip")
    require(0 < a.tokens <= 8 and threads == 512, "tokens of a launch")
    blocks, ways = a.columns // 128, 16 // a.group
    require(a.columns % 128 == 0 and 16 % a.group == 0 and ways <= blocks // 2, "a block each")
    require(not any(p % 16 for p in (a.weight, a.x)) and a.stride % 8 == 0, "16 bytes at a time")
    require(shared == 16_384 + a.tokens * (-(-blocks // 2) * 128 + 8) * 2, "the larger half")
    require(grid[0] % 2 == 0 and 0 < grid[0] <= 132 and grid[1] == 1, "clusters of two blocks")
    weight = at(a.weight, FP8, a.rows, a.columns)
    scale = at(a.scale, F32, -(-a.rows // 128), blocks)
    wide = at(a.x, BF16, (a.tokens - 1) * a.stride + a.columns)
    x = torch.as_strided(wide, (a.tokens, a.columns), (a.stride, 1))
    made = x.double() @ spread(weight, scale, 128, 128).double().T
    at(a.out, BF16, a.tokens, a.rows).copy_(made)
