"""FP8 weights in about 7.3 bits each, without loss, for few tokens: csrc/fp8_compressed.cuh."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.gates import BLOCK, MOST_OTHERS, OTHERS_AT

_SOURCE = "fp8_compressed.cu"
_BASES = 9  # exponents from which eight have a code


@dataclass(frozen=True, slots=True)
class CodedFp8:
    """tiles: uint8, of `stride` bytes each. base: the lowest of the exponents that have a code."""

    tiles: Tensor
    stride: int
    base: int

    def fields(self) -> dict[str, int]:
        """What csrc/experts_streaming.cu is told of a matrix."""
        return {"tiles": self.tiles.data_ptr(), "stride": self.stride, "base": self.base}


class _Fp8CompressedArgs(ctypes.Structure):
    """Args of csrc/fp8_compressed.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "tiles", "most")),
        *((name, ctypes.c_int32) for name in ("columns", "stride", "lowest", "halves", "half")),
    )


def defines() -> dict[str, int]:
    return {
        "ARGS": ctypes.sizeof(_Fp8CompressedArgs),
        "OTHERS_AT": OTHERS_AT,
        "MOST_OTHERS": MOST_OTHERS,
    }


@cache
def _module(device: torch.device, pin: str) -> nvrtc.Module:
    """Of the current device, which `device` is."""
    return nvrtc.module(_SOURCE, defines(), pin)


def encode(values: Tensor, pin: str, halves: int = 1) -> CodedFp8 | None:
    """values: float8_e4m3fn [rows, columns], or stacks of them, contiguous, in whole blocks of 128
    × 128. pin: what runs without. halves: 2 for stacks of two matrices, whose tiles lie in turns.
    None where too many weights of a tile have another exponent than the eight that most of them
    have. Waits for the device to count them.
    """
    columns, device = values.shape[-1], values.device
    rows = values.numel() // columns
    assert values.dtype == torch.float8_e4m3fn and values.is_contiguous()
    assert columns % BLOCK == 0 and values.shape[-2] % (BLOCK * halves) == 0
    most = torch.zeros(_BASES, dtype=torch.int32, device=device)
    args = _Fp8CompressedArgs(values.data_ptr(), None, most.data_ptr(), columns)
    args.halves, args.half = halves, values.shape[-2] // halves // BLOCK
    module, grid = _module(device, pin), (rows // BLOCK, columns // BLOCK)
    nvrtc.launch(module.function("measure"), grid, 256, 0, args)
    others, args.lowest = min((count, base) for base, count in enumerate(most.tolist()))
    if others > MOST_OTHERS:
        return None
    args.stride = -(-(OTHERS_AT + 2 * others) // 16) * 16
    tiles = torch.empty(grid[0] * grid[1] * args.stride, dtype=torch.uint8, device=device)
    args.tiles = tiles.data_ptr()
    nvrtc.launch(module.function("encode"), grid, 256, 0, args)
    return CodedFp8(tiles, args.stride, args.lowest)
