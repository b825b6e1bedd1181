"""LoraDelta: two launches for every row, group and adapter of a batch, whatever its mixture.

A row reads the pair of its own slot, so rows share nothing: made for decode, where rows are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_triton.jit.lora import lora_down_kernel, lora_up_kernel
from ds_runtime_triton.launch import cdiv, pow2

_RANKS = 16  # of one program
_DOWN, _UP = 256, 128  # columns that a program takes at a time


def lora_delta(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """Serves the contract LoraDelta."""
    rows, heads, out = y.shape
    rank, width = a.shape[2:]
    groups = max(x.shape[1], a.shape[0])
    if not rows:
        return
    inner = torch.empty(rows, groups, rank, dtype=torch.float32, device=x.device)
    lora_down_kernel[(rows, groups, cdiv(rank, _RANKS))](
        x, a, adapters, inner, width, rank, groups,
        x.stride(0), _step(x.stride(1), x.shape[1]), _step(a.stride(0), a.shape[0]),
        _RANKS, min(_DOWN, pow2(width, 16)), num_warps=4,
    )  # fmt: skip
    block = min(_UP, pow2(out, 16))
    lora_up_kernel[(rows, heads, cdiv(out, block))](
        inner, b, adapters, y, out, rank, groups,
        y.stride(0), y.stride(1), _step(b.stride(0), b.shape[0]), _RANKS, block, num_warps=4,
    )  # fmt: skip


def _step(stride: int, count: int) -> int:
    """From one group to the next, where they differ."""
    return stride if count > 1 else 0
