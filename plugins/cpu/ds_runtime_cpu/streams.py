"""Native residual streams: their scores as the router's, then one C call."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_cpu.native import active
from ds_runtime_cpu.routing import router_logits
from ds_runtime_cpu.small import CODE, in_rows


def hc_pre(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """HcPre for float32 and bfloat16, and up to 8 streams."""
    tokens, n, _ = x.shape
    post, mix = torch.empty(tokens, n), torch.empty(tokens, n, n)
    to = post.data_ptr(), mix.data_ptr()
    return _collapsed(x, fn, base, scale, (eps, hc_eps), rounds, to), post, mix


def hc_head(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float
) -> Tensor:
    """HcHead for float32 and bfloat16, and up to 8 streams."""
    return _collapsed(x, fn, base, scale, (eps, hc_eps), 0, (0, 0))


def _collapsed(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: tuple[float, float],
    rounds: int,
    to: tuple[int, int],
) -> Tensor:
    tokens, n, d = x.shape
    assert x.is_contiguous() and base.is_contiguous() and scale.is_contiguous()
    scores = router_logits(x.view(tokens, n * d), fn)
    out = x.new_empty(tokens, d)
    active.hc_pre(
        CODE[x.dtype],
        x.data_ptr(),
        scores.data_ptr(),
        base.data_ptr(),
        scale.data_ptr(),
        *eps,
        rounds,
        out.data_ptr(),
        *to,
        tokens,
        n,
        d,
    )
    return out


def hc_post(y: Tensor, x: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """HcPost for float32 and bfloat16."""
    tokens, n, d = x.shape
    y, out = in_rows(y), torch.empty_like(x)
    post, mix = post.contiguous(), mix.contiguous()
    assert x.is_contiguous() and post.dtype == mix.dtype == torch.float32
    active.hc_post(
        CODE[x.dtype],
        y.data_ptr(),
        y.stride()[0],
        x.data_ptr(),
        post.data_ptr(),
        mix.data_ptr(),
        out.data_ptr(),
        tokens,
        n,
        d,
    )
    return out
