"""bfloat16 weights in 12 bits each, without loss, for few tokens: csrc/packed12.cuh."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.gates import COLUMNS, ROWS, TILE

_SOURCE = "packed12.cu"
_WINDOW = 16  # exponents that have a code
_FIRST = 112  # what the lowest of them becomes
_MOST = 64  # how far above it another exponent may lie: sums of such weights stay float32 numbers


@dataclass(frozen=True, slots=True)
class CodedDense:
    """tiles: uint8, of weights that are 2^−power times the true ones."""

    tiles: Tensor
    power: int

    @property
    def back(self) -> float:
        """What sums are multiplied by."""
        return 2.0**self.power

    @property
    def lift(self) -> float:
        return 2.0**-self.power

    def fields(self) -> dict[str, float]:
        """What csrc/experts_streaming.cu is told of a matrix."""
        tiles = self.tiles.data_ptr()
        return {"tiles": tiles, "stride": TILE, "back": self.back, "lift": self.lift}


class _Packed12Args(ctypes.Structure):
    """Args of csrc/packed12.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "tiles", "counts", "crowded")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("columns", "lowest", "halves", "half")),
    )


def readable(x: Tensor) -> Tensor:
    """x, or a copy of it, whose rows the kernels of tiles can read: contiguous, at multiples of 16
    bytes."""
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@cache
def _module(device: torch.device, pin: str) -> nvrtc.Module:
    """Of the current device, which `device` is."""
    return nvrtc.module(_SOURCE, {"ARGS": ctypes.sizeof(_Packed12Args)}, pin)


def encode(values: Tensor, pin: str, halves: int = 1) -> CodedDense | None:
    """values: bfloat16 [rows, columns], or stacks of them, contiguous; columns a multiple of 64.
    pin: what runs without. halves: 2 for stacks of two matrices, whose tiles lie in turns; each has
    a multiple of 128 rows then. None where another exponent than the 16 that most weights have
    comes too often in a tile, or is too large. Waits for the device.
    """
    columns, device = values.shape[-1], values.device
    rows = values.numel() // columns
    assert values.dtype == torch.bfloat16 and values.is_contiguous() and columns % COLUMNS == 0
    blocks = -(-rows // ROWS)
    counts = torch.zeros(256, dtype=torch.int64, device=device)
    crowded = torch.zeros(1, dtype=torch.int32, device=device)
    half = values.shape[-2] // halves // ROWS if halves > 1 else 1
    args = _Packed12Args(
        values.data_ptr(), None, counts.data_ptr(), crowded.data_ptr(), rows, columns
    )
    args.halves, args.half = halves, half
    module = _module(device, pin)
    nvrtc.launch(module.function("count"), (nvrtc.cores(device) * 4, 1), 256, 0, args)
    lowest, most = _window(counts.tolist())
    if most > lowest + _MOST:
        return None
    tiles = torch.empty(blocks * (columns // COLUMNS) * TILE, dtype=torch.uint8, device=device)
    args.tiles, args.lowest = tiles.data_ptr(), lowest
    nvrtc.launch(module.function("encode"), (blocks, columns // COLUMNS), 256, 0, args)
    return None if crowded.item() else CodedDense(tiles, lowest - _FIRST)


def _window(counts: list[int]) -> tuple[int, int]:
    """The lowest of the 16 exponents in a row that come most often, none of them 0, and the highest
    that comes at all."""
    lowest = max(range(1, 256 - _WINDOW), key=lambda e: sum(counts[e : e + _WINDOW]))
    return lowest, max((e for e, count in enumerate(counts) if count), default=0)
