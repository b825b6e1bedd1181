"""Absorbed attention over the paged latent cache: all heads read one latent and one key per token.

A tile of scores is [BLOCK_H heads, BLOCK_N tokens], or with SWAP its transpose: few heads then lie
on the narrow side of the matrix unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.gemm import product, row_side, token_side


@triton.jit
def span(length, split, splits, BLOCK_N: tl.constexpr, LEAST: tl.constexpr = 1):
    """(first token, token after the last, number of splits that have any) of a split. LEAST: of
    its blocks; where there are this many splits that none has more, `length` alone decides."""
    blocks = tl.cdiv(length, BLOCK_N)
    each = tl.maximum(tl.cdiv(blocks, splits), LEAST)
    first = split * each * BLOCK_N
    return first, tl.minimum(first + each * BLOCK_N, length), tl.cdiv(blocks, each)


@triton.jit
def token_rows(
    cache,
    pages,
    start,
    real,
    cache_page,
    cache_row,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Pointers to the cache rows of BLOCK_N tokens from `start` on: [BLOCK_N, 1]."""
    inside = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:  # all on one page
        page = tl.load(pages + start // PAGE).to(tl.int64)
        return (cache + page * cache_page + (start % PAGE) * cache_row) + (inside * cache_row)[
            :, None
        ]
    else:
        token = start + inside
        page = tl.load(pages + token // PAGE, mask=real, other=0).to(tl.int64)
        return cache + (page * cache_page + (token % PAGE) * cache_row)[:, None]


@triton.jit
def no_weights(BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """Sums of no weights: a place for each of a tile of scores."""
    return tl.zeros((BLOCK_N, BLOCK_H) if SWAP else (BLOCK_H, BLOCK_N), tl.float32)


@triton.jit
def weigh(
    q_low,
    q_high,
    k_low,
    k_high,
    real,
    seen,
    top,
    total,
    scale,
    ragged,
    SWAP: tl.constexpr,
    APART: tl.constexpr,
    TREE: tl.constexpr,
):
    """(weights of the tokens in q's dtype, their largest score so far, `total` with them).

    `total` has a sum for every place of the tile, see no_weights. Added up after the last tile
    instead of in each, they need no exchange between warps besides that of the largest score.
    """
    if APART:
        scores = product(q_high, k_high, SWAP) * scale + product(q_low, k_low, SWAP) * scale
    else:
        scores = (product(q_high, k_high, SWAP) + product(q_low, k_low, SWAP)) * scale
    if ragged:
        if TREE:  # finite: a split may see none of its tokens, then weighs nothing beside others
            scores = tl.where(row_side(seen, SWAP), scores, -1e30)
        scores = tl.where(row_side(real, SWAP), scores, float("-inf"))
    above = tl.maximum(top, tl.max(scores, 0 if SWAP else 1))
    weights = tl.exp2(scores - token_side(above, SWAP))
    total = total * token_side(tl.exp2(top - above), SWAP) + weights
    return weights.to(q_low.dtype), above, total


@triton.jit
def attend(
    q_low,
    q_high,
    k_low,
    k_high,
    real,
    acc,
    top,
    total,
    scale,
    start,
    always,
    SWAP: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    seen=None,
    TREE: tl.constexpr = False,
    ragged=True,
):
    """(acc, top, total) after BLOCK_N more tokens; `always` is above 0, and the compiler may not
    know it. TREE: of the `real` tokens only those `seen` count. ragged: whether any may not."""
    if APART:
        above = top
        # Always so. Of chained products the compiler lets all warps compute every score;
        # the branch hides that one follows, and scaling apart that the two are one sum.
        if always > 0:
            weights, above, total = weigh(
                q_low, q_high, k_low, k_high, real, seen, top, total, scale, ragged,
                SWAP, APART, TREE,
            )  # fmt: skip
        else:  # a constant would be kept on chip
            shape: tl.constexpr = (BLOCK_N, BLOCK_H) if SWAP else (BLOCK_H, BLOCK_N)
            weights = tl.full(shape, start, tl.float32).to(q_low.dtype)
    else:  # a branch here would be in the way of the chain of products
        weights, above, total = weigh(
            q_low, q_high, k_low, k_high, real, seen, top, total, scale, True, SWAP, APART, TREE
        )
    acc = acc * token_side(tl.exp2(top - above), SWAP)
    if SWAP:
        acc = tl.dot(tl.trans(k_low), weights, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights, k_low, acc, input_precision="ieee")
    return acc, above, total


@triton.jit
def store_heads(
    acc,
    log_total,
    out,
    partial,
    sums,
    row,
    head,
    split,
    heads,
    latent,
    splits,
    LATENT: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Some heads of one row: one split writes out [rows, heads, latent]. With SPLIT several write
    partial [rows, heads, splits, latent] float32 and sums [rows, heads, splits], the log2 of the
    sums of weights."""
    at_head, at_low = token_side(head, SWAP), row_side(tl.arange(0, LATENT), SWAP)
    inside = (at_head < heads) & (at_low < latent)
    place = row * heads + at_head
    if not SPLIT:
        tl.store(out + place * latent + at_low, acc.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partial + (place * splits + split) * latent + at_low, acc, mask=inside)
        to = sums + (row * heads + head) * splits + split
        tl.store(to, log_total, mask=head < heads)


@entry
def mla_decode_kernel(
    q,
    cache,
    table,
    owner,
    lens,
    bits,
    out,
    partial,
    sums,
    heads,
    latent,
    rope,
    scale,
    q_row,
    q_head,
    cache_page,
    cache_row,
    table_row,
    splits,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    APART: tl.constexpr,
    TREE: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_H heads of one row over its share of the tokens. `scale` holds log2(e); results are
    those of `store_heads`. EXACT: LATENT and ROPE are the widths.
    TREE: of the last 64 tokens the row sees those whose bit is set in its number in `bits`.
    """
    follow(PDL)
    block, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lens + row)
    first, last, _ = span(length, split, splits, BLOCK_N, LEAST)
    if first < last:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        low, high = tl.arange(0, LATENT), tl.arange(0, ROPE)
        q_at = q + row * q_row + tl.minimum(head, heads - 1)[:, None] * q_head
        if EXACT:
            q_low = tl.load(q_at + low[None, :])
            q_high = tl.load(q_at + latent + high[None, :])
        else:
            q_low = tl.load(q_at + low[None, :], mask=(low < latent)[None, :], other=0.0)
            q_high = tl.load(q_at + latent + high[None, :], mask=(high < rope)[None, :], other=0.0)
        pages = table + tl.load(owner + row).to(tl.int64) * table_row
        acc = tl.zeros((LATENT, BLOCK_H) if SWAP else (BLOCK_H, LATENT), tl.float32)
        top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = no_weights(BLOCK_H, BLOCK_N, SWAP)
        for start in range(first, last, BLOCK_N):
            token = start + tl.arange(0, BLOCK_N)
            real = token < last
            seen, ragged = real, start + BLOCK_N > last
            if TREE:
                tail = token - (length - 64)
                ragged = start + BLOCK_N > tl.minimum(last, length - 64)
                seen = (tail < 0) | ((tl.load(bits + row) >> tl.maximum(tail, 0)) & 1 != 0)
            at = token_rows(cache, pages, start, real, cache_page, cache_row, PAGE, BLOCK_N)
            mask = real[:, None]
            if EXACT:
                k_low = tl.load(at + low[None, :], mask=mask, other=0.0)
                k_high = tl.load(at + latent + high[None, :], mask=mask, other=0.0)
            else:
                k_low = tl.load(at + low[None, :], mask=mask & (low < latent)[None, :], other=0.0)
                inside = mask & (high < rope)[None, :]
                k_high = tl.load(at + latent + high[None, :], mask=inside, other=0.0)
            k_low, k_high = k_low.to(q.dtype.element_ty), k_high.to(q.dtype.element_ty)
            acc, top, total = attend(
                q_low, q_high, k_low, k_high, real, acc, top, total, scale, start, last,
                SWAP, APART, BLOCK_H, BLOCK_N, seen, TREE, ragged,
            )  # fmt: skip
        total = tl.sum(total, 0 if SWAP else 1)
        store_heads(
            acc * token_side(1.0 / total, SWAP), top + tl.log2(total), out, partial, sums, row,
            head, split, heads, latent, splits, LATENT, SPLIT, SWAP,
        )  # fmt: skip


@entry
def mla_combine_kernel(
    partial,
    sums,
    lens,
    out,
    heads,
    latent,
    splits,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    MOST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row: the mean of the splits that saw a token, or of all without lens. MOST:
    of splits, a power of two, as AT_ONCE is."""
    follow(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if lens is None:
        used = splits
    else:
        _, _, used = span(tl.load(lens + row), 0, splits, BLOCK_N, LEAST)
    place = (row * heads + head) * splits
    cols = tl.arange(0, LATENT)
    every = tl.arange(0, MOST)
    log_totals = tl.load(sums + place + every, mask=every < used, other=float("-inf"))
    top = tl.max(log_totals, 0)
    total = tl.sum(tl.exp2(log_totals - top), 0)
    acc = tl.zeros((LATENT,), tl.float32)
    for first in range(0, used, AT_ONCE):  # their loads are under way together
        split = first + tl.arange(0, AT_ONCE)
        there = split < used
        log_total = tl.load(sums + place + split, mask=there, other=float("-inf"))
        inside = there[:, None] & (cols < latent)[None, :]
        part = tl.load(
            partial + (place + split)[:, None] * latent + cols[None, :], mask=inside, other=0.0
        )
        acc += tl.sum(part * tl.exp2(log_total - top)[:, None], 0)
    to = out + (row * heads + head) * latent + cols
    tl.store(to, (acc / total).to(out.dtype.element_ty), mask=cols < latent)
