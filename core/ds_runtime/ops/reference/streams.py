"""Torch references of residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import wide


def _shares(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn · flat(x), by the size of flat(x): [tokens, rows], wide."""
    flat = x.flatten(1).to(wide(x.dtype))
    size = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return (flat * size) @ fn.to(flat.dtype).T


def _collapsed(x: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * x.to(pre.dtype)).sum(1).to(x.dtype)


def hc_pre(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of HcPre."""
    n = x.shape[1]
    m = _shares(x, fn, eps)
    scale, base = scale.to(m.dtype), base.to(m.dtype)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + hc_eps
    mix = mix / (mix.sum(1, keepdim=True) + hc_eps)
    for _ in range(rounds - 1):
        mix = mix / (mix.sum(2, keepdim=True) + hc_eps)
        mix = mix / (mix.sum(1, keepdim=True) + hc_eps)
    return _collapsed(x, pre), post, mix


def hc_post(y: Tensor, x: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Reference of HcPost."""
    compute = wide(x.dtype)
    mixed = torch.einsum("tjk,tjd->tkd", mix.to(compute), x.to(compute))
    own = post.to(compute).unsqueeze(-1) * y.to(compute).unsqueeze(1)
    return (own + mixed).to(x.dtype).contiguous()


def hc_head(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float
) -> Tensor:
    """Reference of HcHead."""
    m = _shares(x, fn, eps)
    return _collapsed(x, torch.sigmoid(m * scale.to(m.dtype) + base.to(m.dtype)) + hc_eps)
