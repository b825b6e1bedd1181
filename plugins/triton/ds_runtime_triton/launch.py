"""Launch arithmetic that kernels share: powers of two, blocks, warps."""

from __future__ import annotations

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
