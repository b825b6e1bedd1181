"""Native norms, activation, rotation and cache write: one C call each."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_cpu.native import calls

CODE = {torch.float32: 0, torch.bfloat16: 1}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RmsNorm for float32 and bfloat16."""
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype)
    calls().rms_norm(
        CODE[x.dtype],
        CODE[weight.dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        rows,
        n,
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """AddRmsNorm for float32 and bfloat16; the sum is written over a contiguous residual."""
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype)
    summed = residual if residual.is_contiguous() else torch.empty(rows, n, dtype=x.dtype)
    calls().add_rms_norm(
        CODE[x.dtype],
        CODE[weight.dtype],
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        summed.data_ptr(),
        rows,
        n,
    )
    return out, summed


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiluMul for float32 and bfloat16."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype)
    calls().silu_mul(
        CODE[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, n
    )
    return out


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rope for float32 and bfloat16."""
    rows, heads, d = q.shape
    q_out = torch.empty(rows, heads, d, dtype=q.dtype)
    k_out = torch.empty(rows, d, dtype=k.dtype)
    code, call = CODE[q.dtype], calls().rope
    where, table = positions.data_ptr(), cos_sin.data_ptr()
    call(code, q.data_ptr(), *q.stride()[:2], where, table, q_out.data_ptr(), rows, heads, d)
    call(code, k.data_ptr(), k.stride(0), 0, where, table, k_out.data_ptr(), rows, 1, d)
    return q_out, k_out


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """CacheWrite for latent_pages whose dtype is the compute dtype."""
    assert latent.dtype == cache.dtype == k_rope.dtype
    calls().cache_write(
        CODE[cache.dtype],
        cache.data_ptr(),
        cache.shape[2],
        latent.data_ptr(),
        latent.stride(0),
        latent.shape[1],
        k_rope.data_ptr(),
        k_rope.stride(0),
        slots.data_ptr(),
        slots.shape[0],
    )
