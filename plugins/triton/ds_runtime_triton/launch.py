"""Launch arithmetic that kernels share: powers of two, blocks, warps. Torch-free but `counters`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

COUNTERS = 4096  # tiles of which the pieces can be summed in one launch
MATRIX_LEAST = 16  # columns that a matrix unit takes
_ROW_BLOCK = 8192  # widest row that one program keeps in registers


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def pow2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def halves(width: int) -> tuple[int, int]:
    """Powers of two that hold `width` columns together: one and 0, or two where these are fewer."""
    whole = pow2(width, MATRIX_LEAST)
    first = whole // 2
    rest = pow2(width - first, MATRIX_LEAST)
    return (first, rest) if first >= MATRIX_LEAST and first + rest < whole else (whole, 0)


def row_block(n: int) -> tuple[int, int]:
    """(block, warps) for a program that walks a row of n values."""
    block = min(pow2(n, 16), _ROW_BLOCK)
    return block, min(16, max(1, block // 512))


def counters(like: Tensor) -> Tensor:
    """Zeroed counters of arrived pieces. A weight owns its own: launches on two streams at once
    with one weight would count together."""
    import torch

    return torch.zeros(COUNTERS, dtype=torch.int32, device=like.device)
