"""Torch references of the norms."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.reference.formats import wide


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
