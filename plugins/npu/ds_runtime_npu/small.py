"""Norms, rotation and activation."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_npu.library import npu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RmsNorm with npu_rms_norm, which gives the reciprocal deviations, too."""
    if not x.shape[0]:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out: Tensor = npu().npu_rms_norm(x.contiguous(), weight.to(x.dtype), eps)[0]
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """AddRmsNorm with npu_add_rms_norm."""
    if not x.shape[0]:
        return (torch.empty(x.shape, dtype=x.dtype, device=x.device),) * 2
    normed, _, summed = npu().npu_add_rms_norm(
        x.contiguous(), residual.contiguous(), weight.to(x.dtype), eps
    )
    return normed, summed


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rope with npu_rotary_mul over interleaved pairs, in float32 as the contract says."""
    if not q.shape[0]:
        return torch.empty_like(q), torch.empty_like(k)
    pairs = cos_sin[positions].repeat_interleave(2, -1)  # each pair's cos twice, then sines
    cos, sin = (part[None, :, None] for part in pairs.chunk(2, -1))  # [1, T, 1, d]
    turned = [
        npu().npu_rotary_mul(x.to(torch.float32)[None], cos, sin, "interleave")[0].to(x.dtype)
        for x in (q, k.unsqueeze(1))
    ]
    return turned[0], turned[1][:, 0].contiguous()


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiluMul with npu_swiglu."""
    if not gate_up.shape[0]:
        return gate_up.new_empty(0, gate_up.shape[1] // 2)
    out: Tensor = npu().npu_swiglu(gate_up.contiguous())
    return out
