"""Embed, SiluMul, SiluMulQuantize and MergeState."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_triton.jit.small import (
    embed_kernel,
    merge_state_kernel,
    silu_mul_kernel,
    silu_mul_quantise_kernel,
)
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.quant import codes

_BLOCK = 1024  # columns of one program
_MERGED = 2048  # numbers of one program that merges


def embed(ids: Tensor, table: Tensor, start: int) -> Tensor:
    """Embed: one program per token and block of columns."""
    tokens, (rows, n) = ids.shape[0], table.shape
    out = torch.empty(tokens, n, dtype=table.dtype, device=table.device)
    if tokens and n:
        block = min(_BLOCK, pow2(n, 16))
        embed_kernel[(tokens, cdiv(n, block))](
            ids, table, out, start, rows, n, table.stride(0), block
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiluMul: one program per row and block of columns."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    if rows and n:
        block = min(_BLOCK, pow2(n, 16))
        silu_mul_kernel[(rows, cdiv(n, block))](gate_up, out, n, gate_up.stride(0), block)
    return out


def silu_mul_quantize(gate_up: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """SiluMulQuantize: one program per row and some groups."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    q, scale = codes(rows, n, group, gate_up.device)
    if rows and n:
        width = pow2(group)
        groups = max(1, min(_BLOCK, pow2(n)) // width)
        silu_mul_quantise_kernel[(rows, cdiv(n, groups * group))](
            gate_up, q, scale, n, gate_up.stride(0), *scale.stride(), group, width, groups, ue8m0
        )
    return q, scale


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """MergeState: one program for the heads of some tokens."""
    tokens, heads, d = out_a.shape
    out_a, out_b = (t if t.stride(2) == 1 else t.contiguous() for t in (out_a, out_b))
    out = torch.empty(tokens, heads, d, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=out_a.device)
    if tokens:
        width = pow2(d, 16)
        each = max(1, _MERGED // width)
        merge_state_kernel[(cdiv(tokens * heads, each),)](
            out_a, lse_a, out_b, lse_b, out, lse, tokens * heads, heads, d,
            *out_a.stride()[:2], *out_b.stride()[:2], *lse_a.stride(), *lse_b.stride(),
            each, width, num_warps=4,
        )  # fmt: skip
    return out, lse
