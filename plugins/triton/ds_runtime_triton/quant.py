"""QuantizeGroup, and the quantisation that FP8 matmuls put before themselves."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ds_runtime.api import Facts
from ds_runtime_triton.blocks import FP8
from ds_runtime_triton.jit.quant import quantise_kernel
from ds_runtime_triton.launch import cdiv, pow2


def block_of(rows: int) -> int:
    """Rows of one program."""
    return 1 if rows <= 64 else 8


def variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of QuantizeGroup."""
    return block_of(rows)


def _quantise(
    x: Tensor,
    scale: Tensor,
    group: int,
    ue8m0: bool,
    by_group: bool,
    less: Tensor | None = None,
    dtype: torch.dtype = FP8,
) -> Tensor:
    rows, n = x.shape
    q = torch.empty(rows, n, dtype=dtype, device=x.device)
    if rows and n:
        strides = scale.stride() if not by_group else scale.stride()[::-1]
        block = block_of(rows)
        quantise_kernel[(cdiv(rows, block), cdiv(n, group))](
            x, q, scale, scale if less is None else less, rows, n, x.stride(0), *strides, group,
            pow2(group), ue8m0, less is not None, block, num_warps=1 if block == 1 else 4,
        )  # fmt: skip
    return q


def codes(rows: int, n: int, group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty (e4m3 [rows, n], scales [rows, groups]). Scales lie as matmuls read them: tokens
    contiguous, the column of each group beginning at a multiple of 16 bytes."""
    held = torch.empty(n // group, cdiv(rows, 4) * 4, dtype=torch.float32, device=device)
    return torch.empty(rows, n, dtype=FP8, device=device), held.T[:rows]


def quantize_group(x: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Serves the contract QuantizeGroup."""
    scale = torch.empty(x.shape[0], x.shape[1] // group, dtype=torch.float32, device=x.device)
    return _quantise(x, scale, group, ue8m0, False), scale


def quantise_by_group(
    x: Tensor, group: int, ue8m0: bool, dtype: torch.dtype = FP8
) -> tuple[Tensor, Tensor]:
    """As quantize_group, with scales [groups, tokens]: neighbours for the threads of a matmul.

    dtype: e4m3 or int8. A last group may be short.
    """
    shape = (cdiv(x.shape[1], group), x.shape[0])
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    return _quantise(x, scale, group, ue8m0, True, dtype=dtype), scale


def quantise_for_int4(x: Tensor, group: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, less) for products with int4 codes read as e4m3 numbers, see quantise_kernel;
    scale and less [groups, tokens], zeros for groups after the last column."""
    make = torch.empty if groups == cdiv(x.shape[1], group) else torch.zeros
    scale, less = make(2, groups, x.shape[0], dtype=torch.float32, device=x.device)
    return _quantise(x, scale, group, False, True, less), scale, less
