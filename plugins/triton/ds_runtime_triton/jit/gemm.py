"""Matmul with a weight [N, K]: dense, or FP8 or int8 with scales; the inner dimension may be split.

A tile is [BLOCK_M tokens, BLOCK_N rows of the weight], or with SWAP its transpose: few tokens then
lie on the narrow side of the matrix unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.quant import group_scale, scale_of, to_codes, to_fp8


@triton.jit
def tile_place(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(token tile, weight tile): GROUP token tiles go over all weight tiles, then the next."""
    per_group = GROUP * tiles_n
    first = (pid // per_group) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    inside = pid % per_group
    return first + inside % size, inside // size


@triton.jit
def token_side(values, SWAP: tl.constexpr):
    """Values of tokens, shaped to broadcast over a tile."""
    if SWAP:
        return values[None, :]
    else:
        return values[:, None]


@triton.jit
def row_side(values, SWAP: tl.constexpr):
    """Values of weight rows, shaped to broadcast over a tile."""
    if SWAP:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def product(x, w, SWAP: tl.constexpr):
    """x [tokens, k] times w [rows, k] transposed, or its transpose, in fp32; of int8 in int32."""
    if SWAP:
        return tl.dot(w, tl.trans(x), input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), input_precision="ieee")


@triton.jit
def row_scales(scale, tile_n, n, groups, GROUP_N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to the first scale of each weight row n, or to the one that the whole tile has."""
    if GROUP_N % BLOCK_N == 0:
        return scale + (tile_n * BLOCK_N // GROUP_N).to(tl.int64) * groups
    else:
        return scale + (n // GROUP_N).to(tl.int64) * groups


@triton.jit
def scales_of(token, rows, SWAP: tl.constexpr, UNIFORM: tl.constexpr):
    """Token scales times row scales over a tile. UNIFORM: all rows have one."""
    if UNIFORM:
        return token_side(token, SWAP) * rows
    else:
        return token_side(token, SWAP) * row_side(rows, SWAP)


@triton.jit
def columns(rows, start, k, K, EVEN: tl.constexpr):
    """Columns start + k of the rows at these pointers, 0 after the last of K. EVEN: none is."""
    if EVEN:
        return tl.load(rows + start)
    else:
        return tl.load(rows + start, mask=(start + k < K)[None, :], other=0.0)


@triton.jit
def store_sum(
    acc, to, mask, inside, partial, arrived, tile, split, SIZE: tl.constexpr, SPLIT: tl.constexpr
):
    """Store a tile of SIZE values, `inside` its numbers, at the pointers `to`. If split, whoever
    comes last sums all the pieces, in order, and leaves the counter at 0 for the next launch."""
    if SPLIT == 1:
        tl.store(to, acc.to(to.dtype.element_ty), mask=mask)
    else:
        pieces = partial + tile.to(tl.int64) * (SPLIT * SIZE) + inside
        tl.store(pieces + split * SIZE, acc)
        tl.debug_barrier()  # all threads have stored before one of them reports it
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before == SPLIT - 1:
            total = tl.zeros(acc.shape, tl.float32)
            for i in tl.static_range(SPLIT):
                total += tl.load(pieces + i * SIZE, cache_modifier=".cg")
            tl.store(to, total.to(to.dtype.element_ty), mask=mask)
            tl.store(arrived + tile, 0)


@triton.jit
def store_tile(
    acc,
    y,
    m,
    n,
    M,
    N,
    partial,
    arrived,
    tile,
    split,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """store_sum of the tile of tokens m and weight rows n in y [M, N]."""
    rows: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    cols: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    at_m, at_n = token_side(m, SWAP), row_side(n, SWAP)
    to = y + at_m.to(tl.int64) * N + at_n
    mask = (at_m < M) & (at_n < N)
    inside = tl.arange(0, rows)[:, None] * cols + tl.arange(0, cols)[None, :]
    store_sum(acc, to, mask, inside, partial, arrived, tile, split, rows * cols, SPLIT)


@triton.jit
def store_line(
    line, to, mask, partial, arrived, tile, split, SPLIT: tl.constexpr, COLS: tl.constexpr
):
    """store_sum of one row: `line` and the pointers `to` are [COLS]."""
    store_sum(line, to, mask, tl.arange(0, COLS), partial, arrived, tile, split, COLS, SPLIT)


@entry
def dense_gemm_kernel(
    x,
    w,
    y,
    partial,
    arrived,
    M,
    N,
    K,
    stride_x,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x · wᵀ. EVEN: BLOCK_K · SPLIT divides K."""
    follow(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_place(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows behind the end are read again from the last one and not stored.
    x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_x + k[None, :]
    w_rows = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    for start in range(split * each, tl.minimum((split + 1) * each, K), BLOCK_K):
        a, b = columns(x_rows, start, k, K, EVEN), columns(w_rows, start, k, K, EVEN)
        acc += product(a, b, SWAP)
    store_tile(acc, y, m, n, M, N, partial, arrived, tile, split, SPLIT, SWAP, BLOCK_M, BLOCK_N)


@entry
def fp8_gemm_kernel(
    x,
    x_scale,
    w,
    w_scale,
    y,
    partial,
    arrived,
    M,
    N,
    K,
    stride_x,
    step,
    x_step,
    GROUP_N: tl.constexpr,
    UE8M0: tl.constexpr,
    QUANTISED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x · wᵀ where BLOCK_K columns share a scale.

    w_scale: [N / GROUP_N, K / BLOCK_K], or with step 0 one column for all. QUANTISED: x is
    quantised like w, with x_scale [K / BLOCK_K, M], x_step between its rows; otherwise every
    program quantises the tokens that it reads.
    """
    follow(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_place(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_read, n_read = tl.minimum(m, M - 1), tl.minimum(n, N - 1)
    x_rows = x + m_read.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_rows = w + n_read.to(tl.int64)[:, None] * K + k[None, :]
    groups = tl.cdiv(K, BLOCK_K)
    width = (groups - 1) * step + 1
    w_scales = row_scales(w_scale, tile_n, n_read, width, GROUP_N, BLOCK_N)
    uniform: tl.constexpr = GROUP_N % BLOCK_N == 0
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    each = tl.cdiv(groups, SPLIT)
    # Scales are read one group ahead: nothing else hides their latency.
    next = tl.minimum(split * each, groups - 1)
    rows = tl.load(w_scales + next * step)
    scale = tl.zeros((BLOCK_M,), tl.float32)
    if QUANTISED:
        scale = tl.load(x_scale + next * x_step + m_read)
    for group in range(split * each, tl.minimum((split + 1) * each, groups)):
        next = tl.minimum(group + 1, groups - 1)
        next_rows, next_scale = tl.load(w_scales + next * step), scale
        if QUANTISED:
            next_scale = tl.load(x_scale + next * x_step + m_read)
        start = group * BLOCK_K
        a, b = columns(x_rows, start, k, K, EVEN), columns(w_rows, start, k, K, EVEN)
        if not QUANTISED:
            values = a.to(tl.float32)
            scale = scale_of(values, 1, UE8M0, w.dtype.element_ty)
            a = to_codes(values / scale[:, None], w.dtype.element_ty)
        acc += product(a, b, SWAP) * scales_of(scale, rows, SWAP, uniform)
        rows, scale = next_rows, next_scale
    store_tile(acc, y, m, n, M, N, partial, arrived, tile, split, SPLIT, SWAP, BLOCK_M, BLOCK_N)


@entry
def fp8_vector_kernel(
    x,
    w,
    w_scale,
    y,
    partial,
    arrived,
    N,
    K,
    GROUP_N: tl.constexpr,
    UE8M0: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """As fp8_gemm_kernel for a single token, without the matrix unit: GROUPS groups of BLOCK_K
    columns of BLOCK_N rows are read at once. EVEN: they divide K."""
    follow(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(n, N - 1)
    group = tl.arange(0, GROUPS)
    inside = group[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    groups = tl.cdiv(K, BLOCK_K)
    steps = tl.cdiv(groups, GROUPS)
    each = tl.cdiv(steps, SPLIT)
    w_rows = w + (read.to(tl.int64) * K)[:, None, None] + inside[None, :, :]
    w_scales = w_scale + (read // GROUP_N)[:, None] * groups + group[None, :]
    line = tl.zeros((BLOCK_N,), tl.float32)
    for step in range(split * each, tl.minimum((split + 1) * each, steps)):
        first = step * GROUPS
        start = first * BLOCK_K
        if EVEN:
            b, a = tl.load(w_rows + start), tl.load(x + start + inside)
            rows = tl.load(w_scales + first)
        else:
            real = start + inside < K
            b = tl.load(w_rows + start, mask=real[None, :, :], other=0.0)
            a = tl.load(x + start + inside, mask=real, other=0.0)
            rows = tl.load(w_scales + first, mask=(first + group < groups)[None, :], other=0.0)
        values = a.to(tl.float32)
        scale = group_scale(tl.max(tl.abs(values), 1), UE8M0)
        made = to_fp8(values / scale[:, None], w.dtype.element_ty).to(tl.float32)
        dots = tl.sum(b.to(tl.float32) * made[None, :, :], 2)  # [BLOCK_N, GROUPS]
        line += tl.sum(dots * (scale[None, :] * rows), 1)
    store_line(line, y + n, n < N, partial, arrived, tile, split, SPLIT, BLOCK_N)


@entry
def fp8_wide_kernel(
    x,
    x_scale,
    w,
    w_scale,
    y,
    M,
    N,
    K,
    stride_x,
    step,
    x_step,
    GROUP_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """As fp8_gemm_kernel, for many quantised tokens. The tile is multiplied in two halves, so that
    a product waits in half the registers, and two programs share a core."""
    follow(PDL)
    half: tl.constexpr = BLOCK_N // 2
    tile = tl.program_id(0)
    tile_m, tile_n = tile_place(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, half)
    k = tl.arange(0, BLOCK_K)
    m_read = tl.minimum(m, M - 1)
    low, high = tl.minimum(n, N - 1), tl.minimum(n + half, N - 1)
    x_rows = x + m_read.to(tl.int64)[:, None] * stride_x + k[None, :]
    low_rows = w + low.to(tl.int64)[:, None] * K + k[None, :]
    high_rows = w + high.to(tl.int64)[:, None] * K + k[None, :]
    groups = tl.cdiv(K, BLOCK_K)
    uniform: tl.constexpr = GROUP_N % half == 0
    width = (groups - 1) * step + 1
    low_scales = row_scales(w_scale, 2 * tile_n, low, width, GROUP_N, half)
    high_scales = row_scales(w_scale, 2 * tile_n + 1, high, width, GROUP_N, half)
    if uniform:  # of a tile that begins behind the last row
        high_scales = w_scale + (tl.minimum((2 * tile_n + 1) * half, N - 1) // GROUP_N) * width
    low_acc = tl.zeros((BLOCK_M, half), tl.float32)
    high_acc = tl.zeros((BLOCK_M, half), tl.float32)
    low_scale, high_scale = tl.load(low_scales), tl.load(high_scales)
    scale = tl.load(x_scale + m_read)
    for group in range(groups):
        next = tl.minimum(group + 1, groups - 1)
        at = next * step
        next_low, next_high = tl.load(low_scales + at), tl.load(high_scales + at)
        next_scale = tl.load(x_scale + next * x_step + m_read)
        start = group * BLOCK_K
        a = columns(x_rows, start, k, K, EVEN)
        b, c = columns(low_rows, start, k, K, EVEN), columns(high_rows, start, k, K, EVEN)
        low_acc += product(a, b, False) * scales_of(scale, low_scale, False, uniform)
        high_acc += product(a, c, False) * scales_of(scale, high_scale, False, uniform)
        scale, low_scale, high_scale = next_scale, next_low, next_high
    to = y + m.to(tl.int64)[:, None] * N + n[None, :]
    mask = (m < M)[:, None]
    tl.store(to, low_acc.to(y.dtype.element_ty), mask=mask & (n < N)[None, :])
    tl.store(to + half, high_acc.to(y.dtype.element_ty), mask=mask & (n + half < N)[None, :])
