"""Torch reference of the rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import wide


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = True) -> Tensor:
    """Returns x [..., d] with its first r dims rotated.

    * interleaved: pairs (x0, x1)… turn together. Else those of halves do, (xᵢ, x[i + r/2]).
    * cos, sin: [..., r / 2] in the dtype of x, broadcast over its other dims.
    """
    r = 2 * cos.shape[-1]
    if interleaved:
        a, b = x[..., 0:r:2], x[..., 1:r:2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = x[..., : r // 2], x[..., r // 2 : r]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned if r == x.shape[-1] else torch.cat((turned, x[..., r:]), dim=-1)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of Rope."""
    table = cos_sin[positions].to(wide(q.dtype))  # [tokens, d]
    cos, sin = table.chunk(2, dim=-1)
    heads = rotated(q.to(cos.dtype), cos.unsqueeze(1), sin.unsqueeze(1))
    return heads.to(q.dtype), rotated(k.to(cos.dtype), cos, sin).to(k.dtype)
