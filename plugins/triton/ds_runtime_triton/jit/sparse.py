"""Absorbed attention over chosen slots of the paged latent cache, plain or with FP8 groups."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.gemm import token_side
from ds_runtime_triton.jit.mla import attend, no_weights, store_heads

GROUP: tl.constexpr = tl.constexpr(128)  # latents that share a scale
NOTHING: tl.constexpr = tl.constexpr(-1e30)  # a score below all; −inf − −inf would be NaN


@triton.jit
def latents(
    cache, scales, page, row, real, latent, cache_page, cache_row, scale_page, scale_row,
    LATENT: tl.constexpr, GROUPED: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, LATENT] of the tokens at these pages and rows; float32 where they are GROUPED."""
    low = tl.arange(0, LATENT)
    at = (cache + page * cache_page + row * cache_row)[:, None] + low[None, :]
    if EXACT:
        values = tl.load(at, mask=real[:, None], other=0.0)
    else:
        values = tl.load(at, mask=real[:, None] & (low < latent)[None, :], other=0.0)
    if GROUPED:
        width: tl.constexpr = LATENT if LATENT < GROUP else GROUP
        groups: tl.constexpr = LATENT // width
        group = tl.arange(0, groups)
        at_scale = (scales + page * scale_page + row * scale_row)[:, None] + group[None, :]
        inside = real[:, None] & (group * GROUP < latent)[None, :]
        scale = tl.load(at_scale, mask=inside, other=0.0)
        wide = tl.reshape(values.to(tl.float32), (BLOCK_N, groups, width)) * scale[:, :, None]
        values = tl.reshape(wide, (BLOCK_N, LATENT))
    return values


@entry
def sparse_mla_kernel(
    q,
    cache,
    scales,
    keys,
    picked,
    out,
    partial,
    sums,
    heads,
    latent,
    rope,
    count,
    share,
    scale,
    q_row,
    q_head,
    q_col,
    slot_row,
    cache_page,
    cache_row,
    scale_page,
    scale_row,
    key_page,
    key_row,
    splits,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPED: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_H heads of one row over `share` of its `count` slots, `picked`. `scale` holds log2(e).

    cache, scales, keys: where the latents, the scales (if GROUPED) and the rotated keys of slot 0
    begin, each with its own strides. Results are those of `store_heads`. EXACT: LATENT and ROPE
    are the widths.
    """
    follow(PDL)
    block, split = tl.program_id(0), tl.program_id(1)
    line = tl.program_id(2).to(tl.int64)
    head = block * BLOCK_H + tl.arange(0, BLOCK_H)
    low, high = tl.arange(0, LATENT), tl.arange(0, ROPE)
    q_at = q + line * q_row + tl.minimum(head, heads - 1)[:, None] * q_head
    if EXACT:
        q_low = tl.load(q_at + low[None, :] * q_col)
        q_high = tl.load(q_at + (latent + high[None, :]) * q_col)
    else:
        q_low = tl.load(q_at + low[None, :] * q_col, mask=(low < latent)[None, :], other=0.0)
        q_high = tl.load(
            q_at + (latent + high[None, :]) * q_col, mask=(high < rope)[None, :], other=0.0
        )
    acc = tl.zeros((LATENT, BLOCK_H) if SWAP else (BLOCK_H, LATENT), tl.float32)
    top = tl.full((BLOCK_H,), NOTHING, tl.float32)
    total = no_weights(BLOCK_H, BLOCK_N, SWAP)
    last = tl.minimum(split * share + share, count)
    for start in range(split * share, last, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        slot = tl.load(picked + line * slot_row + place, mask=place < last, other=-1)
        real = slot >= 0
        slot = tl.maximum(slot, 0)
        page, row = (slot // PAGE).to(tl.int64), slot % PAGE
        k_low = latents(
            cache, scales, page, row, real, latent, cache_page, cache_row, scale_page, scale_row,
            LATENT, GROUPED, EXACT, BLOCK_N,
        )  # fmt: skip
        at = (keys + page * key_page + row * key_row)[:, None] + high[None, :]
        if EXACT:
            k_high = tl.load(at, mask=real[:, None], other=0.0)
        else:
            k_high = tl.load(at, mask=real[:, None] & (high < rope)[None, :], other=0.0)
        k_low, k_high = k_low.to(q.dtype.element_ty), k_high.to(q.dtype.element_ty)
        acc, top, total = attend(
            q_low, q_high, k_low, k_high, real, acc, top, total, scale, start, count,
            SWAP, APART, BLOCK_H, BLOCK_N,
        )  # fmt: skip
    total = tl.sum(total, 0 if SWAP else 1)
    some = total > 0.0  # a row without slots gives 0
    inverse = tl.where(some, 1.0 / total, 0.0)
    store_heads(
        acc * token_side(inverse, SWAP), tl.where(some, top + tl.log2(total), NOTHING), out,
        partial, sums, line, head, split, heads, latent, splits, LATENT, SPLIT, SWAP,
    )  # fmt: skip
