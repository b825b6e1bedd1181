"""Torch reference of the interleaved rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import wide


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2].to(cos.dtype), x[..., 1::2].to(cos.dtype)
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)  # [..., d / 2, 2]
    return pairs.flatten(-2).to(x.dtype)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of Rope."""
    table = cos_sin[positions].to(wide(q.dtype))  # [tokens, d]
    cos, sin = table.chunk(2, dim=-1)
    return _rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), _rotate(k, cos, sin)
