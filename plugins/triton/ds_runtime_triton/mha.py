"""MhaPrefill."""

from __future__ import annotations

from math import e, log2

import torch
from torch import Tensor

from ds_runtime.api import Segments
from ds_runtime_triton.config import folder, tuned
from ds_runtime_triton.jit.mha import mha_prefill_kernel
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.machine import architecture

_LEAST = 16  # columns that the matrix unit takes


def _halves(width: int) -> tuple[int, int]:
    """A width as two powers of two that cover it, the second 0 where one is enough."""
    low = pow2(width + 1) // 2
    if low < _LEAST or low == width:
        return pow2(width, _LEAST), 0
    return low, pow2(width - low, _LEAST)


def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """MhaPrefill: one program per block of queries, head and sequence."""
    (tokens, heads, d_qk), d_v = q.shape, v.shape[2]
    out = torch.empty(tokens, heads, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    longest = q_segs.longest
    if longest:
        arch = folder(architecture(), str(q.dtype).removeprefix("torch."))
        config = tuned(arch, "mha_prefill", f"QK={d_qk},V={d_v}").at(longest)
        low, high = _halves(d_qk)
        wide = pow2(d_v, _LEAST)
        mha_prefill_kernel[(cdiv(longest, config["BLOCK_M"]), heads, len(q_segs.lens))](
            q, k, v, q_segs.cu, k_segs.cu, out, lse, heads, d_qk, d_v, scale * log2(e),
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], CAUSAL=causal,
            EXACT=low + high == d_qk and wide == d_v, LOW=low, HIGH=high, V=wide, **config,
        )  # fmt: skip
    return out, lse
