"""FP8 weights for few tokens, about as fast as they can be read: csrc/fp8_few.cu.

Activations stay in bfloat16, so that no launch quantises them, and products are summed in float32.
Weights lie as FP8_ROWS says: kernels of more tokens read them, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import FP8_ROWS, Facts, Packed, Weight, fp8_blocks
from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.gates import BLOCK
from ds_runtime_cuda.packed12.format import readable

_SOURCE, _PIN = "fp8_few.cu", "linear=triton"
MOST = 8  # tokens of a launch
AHEAD = 4  # pieces of weights that a warp has on their way
_WARPS, _TILE, _THREADS = 16, 16, 512  # of a block; rows that a warp multiplies
_ON_CHIP = 232_448  # bytes that a block may have, whatever the weight
_SUMS = 2 * _WARPS * _TILE * MOST * 4  # bytes of a block's sums, for two turns
GROUPS = (16, 8, 4, 2, 1)  # tiles that the warps of a cluster take together
# What a launch takes, fitted to benchmarks/fp8_few.py --search on one H200: bytes per microsecond
# of a cluster and of the chip, and microseconds of a turn and of each part of a row in it.
_CLUSTER, _CHIP, _TURN, _PART = 70e3, 4.4e6, 0.2, 0.1


class _Fp8FewArgs(ctypes.Structure):
    """Args of csrc/fp8_few.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "x", "out")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("tokens", "rows", "columns", "group")),
    )


def defines(ahead: int = AHEAD) -> dict[str, int]:
    return {"ARGS": ctypes.sizeof(_Fp8FewArgs), "AHEAD": ahead}


@cache
def _module(device: torch.device, ahead: int) -> nvrtc.Module:
    """Of the current device, which `device` is."""
    return nvrtc.module(_SOURCE, defines(ahead), _PIN)


def compile_few(facts: Facts, rows: Sequence[int]) -> None:
    """`Compiles.ahead` of LinearFewFp8."""
    if any(rows):
        nvrtc.compile_for_device(_SOURCE, defines())


def groups_for(columns: int) -> list[int]:
    """Groups that leave every warp at least one block of columns.

    A block of threads holds half of the columns. Warps of one tile divide that half among them.
    """
    return [group for group in GROUPS if _WARPS // group <= columns // BLOCK // 2]


@cache
def group_of(rows: int, columns: int, clusters: int) -> int:
    """Tiles that a cluster takes together, so that a launch is estimated to take the least time."""

    def microseconds(group: int) -> float:
        turns = -(-rows // (group * _TILE * clusters))
        slowest = turns * group * _TILE * columns / _CLUSTER
        parts = _WARPS // group
        return max(slowest, rows * columns / _CHIP) + turns * (_TURN + _PART * parts)

    return min(groups_for(columns), key=microseconds)


def _bytes(tokens: int, columns: int) -> int:
    """On-chip memory of a block that has the larger half of the columns."""
    blocks = columns // BLOCK
    return _SUMS + tokens * ((blocks + 1) // 2 * BLOCK + 8) * 2


def multiply(
    x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, group: int = 0, ahead: int = AHEAD
) -> None:
    """out [tokens, rows] = x · Wᵀ in bfloat16, for 1 to 8 tokens.

    weight: e4m3 [rows, columns] without NaN, scale: float32 [⌈rows / 128⌉, columns / 128], both
    contiguous. group: of `groups_for`; 0 for the one that `group_of` names.
    """
    (tokens, columns), rows = x.shape, out.shape[1]
    clusters = nvrtc.cores(x.device) // 2
    group = group or group_of(rows, columns, clusters)
    x = readable(x)
    args = _Fp8FewArgs(
        weight.data_ptr(), scale.data_ptr(), x.data_ptr(), out.data_ptr(),
        x.stride(0), tokens, rows, columns, group,
    )  # fmt: skip
    grid = 2 * min(clusters, -(-rows // (group * _TILE)))
    function = _module(x.device, ahead).function("fp8_few", _ON_CHIP)
    nvrtc.launch(function, (grid, 1), _THREADS, _bytes(tokens, columns), args)


class LinearFewFp8:
    """y = x · Wᵀ of FP8 weights as they are and bfloat16 activations.

    More than eight tokens read the weights once for each eight of them. Shards that cut a block,
    and weights of one block of columns, are held in bfloat16. NaN among the weights, which no
    checkpoint should have, counts as 480.
    """

    tag = "cuda.few_fp8_linear"

    def __init__(self, facts: Facts) -> None:
        pass

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        if weight.shape[1] % BLOCK or not groups_for(weight.shape[1]):
            return fp8_blocks.dense(weight, self.tag)
        return fp8_blocks.packed(weight, self.tag, FP8_ROWS)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag, FP8_ROWS)
        if packed.tag != FP8_ROWS:
            return F.linear(x, packed.tensors["dense"])
        out = torch.empty(x.shape[0], packed.shape[0], dtype=x.dtype, device=x.device)
        weight, scale = packed.tensors["weight"], packed.tensors["scale"]
        for first in range(0, x.shape[0], MOST):
            some = slice(first, first + MOST)
            multiply(x[some], weight, scale, out[some])
        return out
