"""Down projections of routed experts, see jit/experts.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.experts import is_here, place_of, tile_rows
from ds_runtime_triton.jit.gemm import (
    columns,
    product,
    row_scales,
    row_side,
    scales_of,
    store_line,
    token_side,
)
from ds_runtime_triton.jit.quant import scale_of, to_codes


@triton.jit
def multiply(
    x_rows,
    x_scales,
    w_rows,
    w_scales,
    groups,
    K,
    k,
    scale_step,
    step,
    SCALED: tl.constexpr,
    UNIFORM: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum over the groups of BLOCK_K columns: x rows times w rows."""
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    if SCALED:  # scales are read one group ahead: nothing else hides their latency
        scale, rows = tl.load(x_scales), tl.load(w_scales)
    for group in range(groups):
        start = group * BLOCK_K
        a, b = columns(x_rows, start, k, K, EVEN), columns(w_rows, start, k, K, EVEN)
        if SCALED:
            next = tl.minimum(group + 1, groups - 1)
            next_scale, next_rows = (
                tl.load(x_scales + next * scale_step),
                tl.load(w_scales + next * step),
            )
            acc += product(a, b, SWAP) * scales_of(scale, rows, SWAP, UNIFORM)
            scale, rows = next_scale, next_rows
        else:
            acc += product(a, b, SWAP)
    return acc


@entry
def down_kernel(
    h,
    h_scale,
    w,
    w_scale,
    weights,
    out,
    order,
    owner,
    used,
    ids,
    pairs,
    N,
    K,
    scale_rows,
    step,
    GROUP_N: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """weights · (h · downᵀ) of the pairs of a tile: out [pairs, N]. w: [experts, N, K]."""
    follow(PDL)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.load(used)
    tile, tile_n = place_of(tl.program_id(0), tiles_m, tiles_n, GROUP)
    if tile < tiles_m:
        expert, pair, real = tile_rows(order, owner, ids, tile, pairs, BLOCK_M, False)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        read = tl.minimum(n, N - 1)
        groups = tl.cdiv(K, BLOCK_K)
        width = (groups - 1) * step + 1
        acc = multiply(
            h + pair.to(tl.int64)[:, None] * K + k[None, :],
            h_scale + pair,
            w + (expert * N + read)[:, None] * K + k[None, :],
            row_scales(
                w_scale + expert * scale_rows * width, tile_n, read, width, GROUP_N, BLOCK_N
            ),
            groups, K, k, pairs, step, SCALED, GROUP_N % BLOCK_N == 0, SWAP, EVEN,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        weight = tl.load(weights + pair)
        at_m, at_n = token_side(pair, SWAP), row_side(n, SWAP)
        real_m = token_side(real, SWAP)
        weight_m = token_side(weight, SWAP)
        to = out + at_m.to(tl.int64) * N + at_n
        tl.store(to, (acc * weight_m).to(out.dtype.element_ty), mask=real_m & (at_n < N))


@entry
def down_direct_kernel(
    h,
    h_scale,
    w,
    w_scale,
    weights,
    ids,
    out,
    partial,
    arrived,
    pairs,
    N,
    K,
    scale_rows,
    step,
    GROUP_N: tl.constexpr,
    SCALED: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    ABSENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: Σ over its experts of weight · (h · downᵀ): out [tokens, N]. Its experts are
    shared out to SPLIT programs, of which the last to come adds up.

    The one token is BLOCK_M times in the tile: the matrix unit takes no fewer.
    """
    follow(PDL)
    tile, split, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_M)
    read = tl.minimum(n, N - 1)
    groups = tl.cdiv(K, BLOCK_K)
    each: tl.constexpr = (TOP_K + SPLIT - 1) // SPLIT
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    uniform: tl.constexpr = GROUP_N % BLOCK_N == 0
    w_rows = w + read.to(tl.int64)[:, None] * K + k[None, :]
    width = (groups - 1) * step + 1
    w_scales = row_scales(w_scale, tile, read, width, GROUP_N, BLOCK_N)
    for i in tl.static_range(each):
        choice = split * each + i
        if is_here(ids + token * TOP_K, choice, TOP_K, ABSENT):
            pair = token.to(tl.int64) * TOP_K + choice
            expert = tl.load(ids + pair).to(tl.int64)
            share = tl.load(weights + pair)
            x_at = h + (pair * K + 0 * row)[:, None] + k[None, :]
            w_at = w_rows + expert * N * K
            scales = w_scales + expert * scale_rows * width
            for group in range(groups):
                start = group * BLOCK_K
                a, b = columns(x_at, start, k, K, EVEN), columns(w_at, start, k, K, EVEN)
                if SCALED:
                    scale = tl.load(h_scale + group * pairs + pair + 0 * row) * share
                    rows = tl.load(scales + group * step)
                    total += product(a, b, SWAP) * scales_of(scale, rows, SWAP, uniform)
                else:
                    total += product(a, b, SWAP) * share
    first = token_side(row, SWAP) == 0
    line = tl.sum(tl.where(first, total, 0.0), 1 if SWAP else 0)  # [BLOCK_N]
    place = token * tl.num_programs(0) + tile
    to = out + token.to(tl.int64) * N + n
    store_line(line, to, n < N, partial, arrived, place, split, SPLIT, BLOCK_N)


@entry
def down_vector_kernel(
    h,
    w,
    w_scale,
    weights,
    ids,
    out,
    N,
    K,
    scale_rows,
    GROUP_N: tl.constexpr,
    SCALED: tl.constexpr,
    UE8M0: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    ABSENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """As down_direct_kernel without the matrix unit: one token, BLOCK_N rows of all its experts, in
    order. h: float32 [pairs, K]; SCALED: every program quantises what it reads of it."""
    follow(PDL)
    tile, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(n, N - 1).to(tl.int64)
    group = tl.arange(0, GROUPS)
    inside = group[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    groups = tl.cdiv(K, BLOCK_K)
    steps = tl.cdiv(groups, GROUPS)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for at in range(TOP_K * steps):
        pair = token * TOP_K + at // steps
        first = (at % steps) * GROUPS
        start = first * BLOCK_K
        expert, share = tl.load(ids + pair).to(tl.int64), tl.load(weights + pair)
        end = K
        if ABSENT:
            end = tl.where(expert >= 0, K, 0)
            expert, share = tl.maximum(expert, 0), tl.where(expert >= 0, share, 0.0)
        w_rows = w + ((expert * N + read) * K)[:, None, None] + start + inside[None, :, :]
        h_row = h + pair * K + start + inside
        if EVEN and not ABSENT:
            a, b = tl.load(h_row), tl.load(w_rows)
        else:
            real = start + inside < end
            a = tl.load(h_row, mask=real, other=0.0)
            b = tl.load(w_rows, mask=real[None, :, :], other=0.0)
        if SCALED:
            scale = scale_of(a, 1, UE8M0, w.dtype.element_ty)
            a = to_codes(a / scale[:, None], w.dtype.element_ty).to(tl.float32)
            rows = w_scale + ((expert * scale_rows + read // GROUP_N) * groups + first)[:, None]
            there = (first + group < groups)[None, :]
            rows_scale = tl.load(rows + group[None, :], mask=there, other=0.0)
            dots = tl.sum(b.to(tl.float32) * a[None, :, :], 2)
            total += tl.sum(dots * (rows_scale * scale[None, :]), 1) * share
        else:
            total += tl.sum(tl.sum(b.to(tl.float32) * a[None, :, :], 2), 1) * share
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)
