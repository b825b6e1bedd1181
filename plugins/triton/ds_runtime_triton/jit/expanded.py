"""Attention over the paged cache of expanded keys and values, and what writes it."""

from __future__ import annotations

import triton.language as tl

from ds_runtime_triton.jit.cache import stored
from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.mla import span, token_rows


@entry
def mha_decode_kernel(
    q,
    q_rope,
    cache,
    table,
    owner,
    lens,
    bits,
    out,
    partial,
    sums,
    heads,
    nope,
    rope,
    width,
    scale,
    q_row,
    q_head,
    rope_row,
    rope_head,
    cache_page,
    cache_row,
    table_row,
    splits,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row over its share of the tokens. It writes out [rows, heads, width], or of
    several splits partial [rows, heads, splits, width] float32 and sums [rows, heads, splits], the
    log2 of the sums of weights. `scale` holds log2(e). TREE: as in mla_decode_kernel.
    """
    follow(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lens + row)
    first, last, _ = span(length, split, splits, BLOCK_N)
    if first < last:
        low, high, side = tl.arange(0, NOPE), tl.arange(0, ROPE), tl.arange(0, V)
        q_low = tl.load(q + row * q_row + head * q_head + low, mask=low < nope, other=0.0)
        at_rope = q_rope + row * rope_row + head * rope_head
        q_high = tl.load(at_rope + high, mask=high < rope, other=0.0)
        q_low, q_high = q_low.to(tl.float32)[None, :], q_high.to(tl.float32)[None, :]
        pages = table + tl.load(owner + row).to(tl.int64) * table_row
        mine, shared = head * (nope + width), heads * (nope + width)
        acc = tl.zeros((V,), tl.float32)
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        for start in range(first, last, BLOCK_N):
            token = start + tl.arange(0, BLOCK_N)
            real = token < last
            at = token_rows(cache, pages, start, real, cache_page, cache_row, PAGE, BLOCK_N)
            mask = real[:, None]
            k = tl.load(at + mine + low[None, :], mask=mask & (low < nope)[None, :], other=0.0)
            k_rope = tl.load(
                at + shared + high[None, :], mask=mask & (high < rope)[None, :], other=0.0
            )
            scores = tl.sum(k.to(tl.float32) * q_low, 1)
            scores = (scores + tl.sum(k_rope.to(tl.float32) * q_high, 1)) * scale
            if TREE:  # finite: a split may see none of its tokens, then weighs nothing
                tail = token - (length - 64)
                seen = (tail < 0) | ((tl.load(bits + row) >> tl.maximum(tail, 0)) & 1 != 0)
                scores = tl.where(seen, scores, -1e30)
            scores = tl.where(real, scores, float("-inf"))
            above = tl.maximum(top, tl.max(scores, 0))
            weights = tl.exp2(scores - above)
            fade = tl.exp2(top - above)
            v = tl.load(
                at + mine + nope + side[None, :], mask=mask & (side < width)[None, :], other=0.0
            )
            acc = acc * fade + tl.sum(weights[:, None] * v.to(tl.float32), 0)
            total = total * fade + tl.sum(weights, 0)
            top = above
        place = row * heads + head
        if not SPLIT:
            to = out + place * width + side
            tl.store(to, (acc / total).to(out.dtype.element_ty), mask=side < width)
        else:
            place = place * splits + split
            tl.store(partial + place * width + side, acc / total, mask=side < width)
            tl.store(sums + place, top + tl.log2(total))


@entry
def expanded_write_kernel(
    cache,
    values,
    k_rope,
    slots,
    page_size,
    width,
    rope,
    cache_page,
    cache_row,
    values_row,
    rope_row,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of one token's values, or after the last block its rotated key."""
    follow(PDL)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        to = cache + (slot // page_size) * cache_page + (slot % page_size) * cache_row
        if block * BLOCK < width:
            col = block * BLOCK + tl.arange(0, BLOCK)
            some = tl.load(values + token * values_row + col, mask=col < width)
            tl.store(to + col, stored(some, cache.dtype.element_ty), mask=col < width)
        else:
            pair = tl.arange(0, ROPE)
            key = tl.load(k_rope + token * rope_row + pair, mask=pair < rope)
            tl.store(to + width + pair, stored(key, cache.dtype.element_ty), mask=pair < rope)
