"""Launch arithmetic that kernels share: powers of two, blocks, warps."""

from __future__ import annotations

import torch
from torch import Tensor

COUNTERS = 4096  # tiles of which the pieces can be summed in one launch
_ROW_BLOCK = 8192  # widest row that one program keeps in registers


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def pow2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def row_block(n: int) -> tuple[int, int]:
    """(block, warps) for a program that walks a row of n values."""
    block = min(pow2(n, 16), _ROW_BLOCK)
    return block, min(16, max(1, block // 512))


def counters(like: Tensor) -> Tensor:
    """Zeroed counters of arrived pieces. A weight owns its own: launches on two streams at once
    with one weight would count together."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=like.device)
