"""Torch references of the norms."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import wide
from ds_runtime.ops.reference.matrices.linear import quantize_group


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Reference of RmsNorm."""
    compute = wide(x.dtype)
    values = x.to(compute)
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * inverse * weight.to(compute)).to(x.dtype).contiguous()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Reference of AddRmsNorm: the composition."""
    summed = (x + residual).contiguous()
    return rms_norm(summed, weight, eps), summed


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """Reference of RmsNormQuantize: the composition."""
    return quantize_group(rms_norm(x, weight, eps), group, ue8m0)


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of AddRmsNormQuantize: the composition."""
    normed, summed = add_rms_norm(x, residual, weight, eps)
    return (*quantize_group(normed, group, ue8m0), summed)
