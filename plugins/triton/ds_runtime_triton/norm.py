"""RmsNorm and AddRmsNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_triton.jit.norm import rms_norm_kernel, rms_norm_quantise_kernel
from ds_runtime_triton.launch import pow2, row_block
from ds_runtime_triton.quant import codes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RmsNorm: one program per row."""
    return _normed(x, None, x, weight, eps)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """RmsNormQuantize: one program per row."""
    return _quantised(x, None, x, weight, eps, group, ue8m0)


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Serves AddRmsNormQuantize, as its neighbour serves AddRmsNorm."""
    summed = _sum_of(x, residual)
    return (*_quantised(x, residual, summed, weight, eps, group, ue8m0), summed)


def _quantised(
    x: Tensor,
    residual: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    eps: float,
    group: int,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the norm of x, or, where there is a residual, of their sum."""
    rows, n = x.shape
    q, scale = codes(rows, n, group, x.device)
    if rows:
        block, warps = row_block(n)
        width = pow2(group)
        groups = max(1, min(block, pow2(n)) // width)
        other = x if residual is None else residual
        rms_norm_quantise_kernel[(rows,)](
            x, weight, q, scale, n, x.stride(0), *scale.stride(), eps, other, summed,
            other.stride(0), residual is not None, group, width, groups, n <= groups * group,
            ue8m0, num_warps=warps,
        )  # fmt: skip
    return q, scale


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """AddRmsNorm: the sum is written over a contiguous residual."""
    summed = _sum_of(x, residual)
    return _normed(x, residual, summed, weight, eps), summed


def _sum_of(x: Tensor, residual: Tensor) -> Tensor:
    """Where the sum is written."""
    if residual.is_contiguous():
        return residual
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _normed(
    x: Tensor, residual: Tensor | None, summed: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """The norm of x, or, where there is a residual, of their sum."""
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        block, warps = row_block(n)
        other = x if residual is None else residual
        rms_norm_kernel[(rows,)](
            x, weight, out, n, x.stride(0), eps, other, summed, other.stride(0),
            residual is not None, block, n <= block, num_warps=warps,
        )  # fmt: skip
    return out
