"""Routed experts of up to three tokens, from weights in 12 bits: csrc/packed12_experts.cu."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.packed12.format import CodedDense

SOURCE, _PIN = "packed12_experts.cu", "experts=triton"
MOST_TOKENS, _MOST_CHOICES = 3, 8
_ROWS = 16  # of a block
_ON_CHIP = 49_152  # bytes that a block may have without asking


class _TokenExpertsArgs(ctypes.Structure):
    """Args of csrc/packed12_experts.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("gate_up", "down", "x", "h", "weights", "ids", "out")
        ),
        ("stride", ctypes.c_int64),
        *(
            (name, ctypes.c_float)
            for name in ("gate_up_back", "gate_up_lift", "down_back", "down_lift")
        ),
        *((name, ctypes.c_int32) for name in ("tokens", "top_k", "hidden", "inter")),
    )


def defines() -> dict[str, int]:
    return {"ARGS": ctypes.sizeof(_TokenExpertsArgs)}


@cache
def _module(device: torch.device) -> nvrtc.Module:
    """Of the current device, which `device` is."""
    return nvrtc.module(SOURCE, defines(), _PIN)


def fits(tokens: int, top_k: int, hidden: int, inter: int) -> bool:
    """Whether it can, and is faster than kernels that sort pairs by expert."""
    room = (_ON_CHIP - 2048) // 2
    if tokens > MOST_TOKENS or top_k > _MOST_CHOICES:
        return False
    return max(hidden, top_k * inter) <= room


def run(
    x: Tensor, weights: Tensor, ids: Tensor, coded: tuple[CodedDense, CodedDense], inter: int
) -> Tensor:
    """See Experts; all contiguous but rows of x, which begin at whole 16 bytes."""
    (tokens, hidden), top_k, (upper, lower) = x.shape, ids.shape[1], coded
    h = torch.empty(tokens * top_k, inter, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    args = _TokenExpertsArgs(
        upper.tiles.data_ptr(), lower.tiles.data_ptr(), x.data_ptr(), h.data_ptr(),
        weights.data_ptr(), ids.data_ptr(), out.data_ptr(), x.stride(0),
        upper.back, upper.lift, lower.back, lower.lift, tokens, top_k, hidden, inter,
    )  # fmt: skip
    module = _module(x.device)
    grid = (inter // _ROWS, tokens * top_k)
    nvrtc.launch(module.function("gate_up"), grid, 128, hidden * 2, args)
    grid, threads = (hidden // _ROWS, tokens), 64 * top_k
    nvrtc.launch(module.function("down"), grid, threads, top_k * inter * 2, args)
    return out
