"""MhaPrefill."""

from __future__ import annotations

from collections.abc import Hashable
from math import e, log2

import torch
from torch import Tensor

from ds_runtime.api import Facts, Segments
from ds_runtime_triton.config import Sizes, folder, tuned
from ds_runtime_triton.jit.mha import mha_prefill_kernel
from ds_runtime_triton.launch import MATRIX_LEAST, cdiv, halves, pow2
from ds_runtime_triton.machine import architecture


def variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant`, of a sequence of this many new tokens."""
    dims = facts.dims
    return _sizes(facts.dtype, dims["qk_nope"] + dims["qk_rope"], dims["v"]).number(rows)


def _sizes(dtype: str, qk: int, v: int) -> Sizes:
    return tuned(folder(architecture(), dtype), "mha_prefill", f"QK={qk},V={v}")


def mha_prefill(
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """MhaPrefill: one program per block of queries, head and sequence."""
    (tokens, heads, nope), rope, d_v = q.shape, q_rope.shape[2], v.shape[2]
    out = torch.empty(tokens, heads, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    longest = q_segs.longest
    if longest:
        dtype = str(q.dtype).removeprefix("torch.")
        config = _sizes(dtype, nope + rope, d_v).at(longest)
        first, rest = halves(nope)
        rotated, wide = pow2(rope, MATRIX_LEAST), pow2(d_v, MATRIX_LEAST)
        mha_prefill_kernel[(cdiv(longest, config["BLOCK_M"]), heads, len(q_segs.lens))](
            q, q_rope, k, k_rope, v, q_segs.cu, k_segs.cu, out, lse, heads, nope, rope, d_v,
            scale * log2(e), *q.stride()[:2], *q_rope.stride()[:2], *k.stride()[:2],
            k_rope.stride(0), *v.stride()[:2], CAUSAL=causal,
            EXACT=(first + rest, rotated, wide) == (nope, rope, d_v), NOPE=first, REST=rest,
            ROPE=rotated, V=wide, **config,
        )  # fmt: skip
    return out, lse
