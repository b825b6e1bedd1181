"""Routed experts: pairs (token, choice) sorted into tiles of one expert, then two matmuls.

Pair p is choice p % top_k of token p // top_k. A tile holds up to BLOCK_M pairs of one expert;
empty places hold the number of pairs. With DIRECT nothing is sorted: tile p is pair p alone. With
ABSENT the expert of a pair may be −1: it is in no tile, and nothing reads what its row holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.gemm import (
    columns,
    product,
    row_scales,
    row_side,
    scales_of,
    token_side,
)
from ds_runtime_triton.jit.quant import scale_of, to_codes
from ds_runtime_triton.jit.small import silu


@entry
def sort_pairs_kernel(
    ids,
    order,
    owner,
    used,
    pairs,
    num_experts,
    x,
    q,
    x_scale,
    tokens,
    n,
    stride_x,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_K: tl.constexpr,
    UE8M0: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first ⌈num_experts / 2⌉ programs fill the tiles of two experts each: order [tiles ·
    BLOCK_M], owner [tiles], used [1] (number of tiles). The others quantise ROWS tokens by one
    group each (GROUP_K 0: there are none)."""
    follow(PDL)
    pid = tl.program_id(0)
    sorters = tl.cdiv(num_experts, 2)
    if pid < sorters:
        even, odd = 2 * pid, 2 * pid + 1
        expert = tl.arange(0, EXPERTS)
        lane = tl.arange(0, CHUNK)
        counts = tl.zeros((EXPERTS,), tl.int32)
        for start in range(0, pairs, CHUNK):
            at = start + lane
            id = tl.load(ids + at, mask=at < pairs, other=-1)
            counts += tl.histogram(id, EXPERTS, mask=id >= 0)
        tiles = (counts + BLOCK_M - 1) // BLOCK_M
        first = tl.sum(tl.where(expert < even, tiles, 0), 0)
        own = tl.sum(tl.where(expert == even, tiles, 0), 0)
        other = tl.sum(tl.where(expert == odd, tiles, 0), 0)
        if pid == 0:
            tl.store(used, tl.sum(tiles, 0))
        for i in range(own):
            tl.store(owner + first + i, even)
        for i in range(other):
            tl.store(owner + first + own + i, odd)
        then = (first + own) * BLOCK_M
        end = then + other * BLOCK_M
        at_even, at_odd = first * BLOCK_M, then
        for start in range(0, pairs, CHUNK):
            at = start + lane
            id = tl.load(ids + at, mask=at < pairs, other=-1)
            # both counts in one number: of a chunk neither reaches 2^16
            one = (id == even).to(tl.int32) + ((id == odd).to(tl.int32) << 16)
            before = tl.cumsum(one, 0) - one
            place = tl.where(id == even, at_even + (before & 0xFFFF), at_odd + (before >> 16))
            tl.store(order + place, at, mask=one != 0)
            found = tl.sum(one, 0)
            at_even += found & 0xFFFF
            at_odd += found >> 16
        rest = tl.arange(0, BLOCK_M)
        tl.store(order + at_even + rest, pairs + 0 * rest, mask=at_even + rest < then)
        tl.store(order + at_odd + rest, pairs + 0 * rest, mask=at_odd + rest < end)
    elif GROUP_K > 0:
        groups = tl.cdiv(n, GROUP_K)
        task = pid - sorters
        token = (task // groups) * ROWS + tl.arange(0, ROWS)
        group = task % groups
        cols = group * GROUP_K + tl.arange(0, GROUP_K)
        mask = (token < tokens)[:, None] & (cols < n)[None, :]
        at = token.to(tl.int64)[:, None]
        values = tl.load(x + at * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = scale_of(values, 1, UE8M0, q.dtype.element_ty)
        made = to_codes(values / scale[:, None], q.dtype.element_ty)
        tl.store(q + at * n + cols[None, :], made, mask=mask)
        tl.store(x_scale + group * tokens + token, scale, mask=token < tokens)


@triton.jit
def tile_rows(order, owner, ids, tile, pairs, BLOCK_M: tl.constexpr, DIRECT: tl.constexpr):
    """(expert of the tile, its pairs [BLOCK_M], whether each is one)."""
    row = tl.arange(0, BLOCK_M)
    if DIRECT:
        expert = tl.load(ids + tile)
        pair = tile + 0 * row
        real = row == 0
    else:
        expert = tl.load(owner + tile)
        pair = tl.load(order + tile * BLOCK_M + row)
        real = pair < pairs
    return expert.to(tl.int64), tl.where(real, pair, 0), real


@triton.jit
def is_here(ids, tile, tiles, ABSENT: tl.constexpr):
    """Whether there is such a tile. ABSENT: tiles are pairs, and some experts are not here."""
    here = tile < tiles
    if ABSENT:
        here = tl.load(ids + tile, mask=here, other=-1) >= 0
    return here


@triton.jit
def place_of(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """As tile_place, for a number of token tiles that only the device knows."""
    per_group = GROUP * tiles_n
    first = (pid // per_group) * GROUP
    size = tl.maximum(tl.minimum(tiles_m - first, GROUP), 1)
    inside = pid % per_group
    return first + inside % size, inside // size


@entry
def gate_up_kernel(
    x,
    x_scale,
    w,
    w_scale,
    out,
    out_scale,
    order,
    owner,
    used,
    ids,
    pairs,
    tokens,
    N,
    K,
    stride_x,
    scale_rows,
    step,
    GROUP_N: tl.constexpr,
    SCALED: tl.constexpr,
    UE8M0: tl.constexpr,
    OUT_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    ABSENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """silu(x · gateᵀ) · (x · upᵀ) of the pairs of a tile: out [pairs, N].

    w: [experts, 2, N, K], gate then up; w_scale: [experts, 2, scale_rows, ⌈K / BLOCK_K⌉], a row per
    GROUP_N. SCALED: x, w and out are e4m3 or int8, x with x_scale [groups, tokens], out with
    out_scale [⌈N / OUT_GROUP⌉, pairs]; OUT_GROUP divides BLOCK_N.
    """
    follow(PDL)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = pairs
    if not DIRECT:
        tiles_m = tl.load(used)
    tile, tile_n = place_of(tl.program_id(0), tiles_m, tiles_n, GROUP)
    if is_here(ids, tile, tiles_m, ABSENT):
        expert, pair, real = tile_rows(order, owner, ids, tile, pairs, BLOCK_M, DIRECT)
        token = pair // TOP_K
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        read = tl.minimum(n, N - 1)
        groups = tl.cdiv(K, BLOCK_K)
        x_rows = x + token.to(tl.int64)[:, None] * stride_x + k[None, :]
        gate_rows = w + (expert * 2 * N + read)[:, None] * K + k[None, :]
        up_rows = w + (expert * 2 * N + N + read)[:, None] * K + k[None, :]
        width = (groups - 1) * step + 1
        scales = w_scale + expert * 2 * scale_rows * width
        gate_scales = row_scales(scales, tile_n, read, width, GROUP_N, BLOCK_N)
        uniform: tl.constexpr = GROUP_N % BLOCK_N == 0
        up_scales = gate_scales + scale_rows * width
        gate = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        up = gate
        if SCALED:
            scale = tl.load(x_scale + token)
            gate_row, up_row = tl.load(gate_scales), tl.load(up_scales)
        for group in range(0, groups):
            start = group * BLOCK_K
            a = columns(x_rows, start, k, K, EVEN)
            b, c = columns(gate_rows, start, k, K, EVEN), columns(up_rows, start, k, K, EVEN)
            if SCALED:
                next = tl.minimum(group + 1, groups - 1)
                next_scale = tl.load(x_scale + next * tokens + token)
                place = next * step
                next_gate, next_up = tl.load(gate_scales + place), tl.load(up_scales + place)
                gate += product(a, b, SWAP) * scales_of(scale, gate_row, SWAP, uniform)
                up += product(a, c, SWAP) * scales_of(scale, up_row, SWAP, uniform)
                scale, gate_row, up_row = next_scale, next_gate, next_up
            else:
                gate += product(a, b, SWAP)
                up += product(a, c, SWAP)
        hidden = silu(gate) * up
        at_m, at_n = token_side(pair, SWAP), row_side(n, SWAP)
        real_m = token_side(real, SWAP)
        to = out + at_m.to(tl.int64) * N + at_n
        mask = real_m & (at_n < N)
        if SCALED:
            hidden = tl.where(mask, hidden, 0.0)
            parts: tl.constexpr = BLOCK_N // OUT_GROUP
            if SWAP:
                cut = tl.reshape(hidden, (parts, OUT_GROUP, BLOCK_M))
                scales = scale_of(cut, 1, UE8M0, out.dtype.element_ty)  # [parts, BLOCK_M]
                made = tl.reshape(cut / scales[:, None, :], (BLOCK_N, BLOCK_M))
                part = tile_n * parts + tl.arange(0, parts)[:, None]
                where, kept = pair[None, :], real[None, :]
            else:
                cut = tl.reshape(hidden, (BLOCK_M, parts, OUT_GROUP))
                scales = scale_of(cut, 2, UE8M0, out.dtype.element_ty)  # [BLOCK_M, parts]
                made = tl.reshape(cut / scales[:, :, None], (BLOCK_M, BLOCK_N))
                part = tile_n * parts + tl.arange(0, parts)[None, :]
                where, kept = pair[:, None], real[:, None]
            kept = kept & (part * OUT_GROUP < N)
            tl.store(out_scale + part * pairs + where, scales, mask=kept)
            tl.store(to, to_codes(made, out.dtype.element_ty), mask=mask)
        else:
            tl.store(to, hidden.to(out.dtype.element_ty), mask=mask)


@entry
def gate_up_vector_kernel(
    x,
    w,
    w_scale,
    out,
    ids,
    N,
    K,
    stride_x,
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
    """As gate_up_kernel for a few tokens, without the matrix unit: one pair, BLOCK_N rows of gate
    and of up, GROUPS groups of BLOCK_K columns at once. out: float32 [pairs, N]. SCALED: every
    program quantises the token that it reads. EVEN: GROUPS groups divide K."""
    follow(PDL)
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    if ABSENT:  # noqa: SIM102 - known when it is compiled
        if expert < 0:
            return
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(n, N - 1)
    group = tl.arange(0, GROUPS)
    inside = group[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    groups = tl.cdiv(K, BLOCK_K)
    x_row = x + (pair // TOP_K) * stride_x
    gate_rows = w + ((expert * 2 * N + read) * K)[:, None, None] + inside[None, :, :]
    up_rows = w + (((expert * 2 + 1) * N + read) * K)[:, None, None] + inside[None, :, :]
    gate_scales = w_scale + ((expert * 2 * scale_rows + read // GROUP_N) * groups)[:, None]
    gate_scales += group[None, :]
    up_scales = gate_scales + scale_rows * groups
    gate = tl.zeros((BLOCK_N,), tl.float32)
    up = gate
    for step in range(tl.cdiv(groups, GROUPS)):
        first = step * GROUPS
        start = first * BLOCK_K
        if EVEN:
            b, c = tl.load(gate_rows + start), tl.load(up_rows + start)
            a = tl.load(x_row + start + inside)
        else:
            real = start + inside < K
            b = tl.load(gate_rows + start, mask=real[None, :, :], other=0.0)
            c = tl.load(up_rows + start, mask=real[None, :, :], other=0.0)
            a = tl.load(x_row + start + inside, mask=real, other=0.0)
        a = a.to(tl.float32)
        if SCALED:
            scale = scale_of(a, 1, UE8M0, w.dtype.element_ty)
            a = to_codes(a / scale[:, None], w.dtype.element_ty).to(tl.float32)
            there = (first + group < groups)[None, :]
            b_scale = tl.load(gate_scales + first, mask=there, other=0.0) * scale[None, :]
            c_scale = tl.load(up_scales + first, mask=there, other=0.0) * scale[None, :]
            gate += tl.sum(tl.sum(b.to(tl.float32) * a[None, :, :], 2) * b_scale, 1)
            up += tl.sum(tl.sum(c.to(tl.float32) * a[None, :, :], 2) * c_scale, 1)
        else:
            gate += tl.sum(tl.sum(b.to(tl.float32) * a[None, :, :], 2), 1)
            up += tl.sum(tl.sum(c.to(tl.float32) * a[None, :, :], 2), 1)
    tl.store(out + pair * N + n, silu(gate) * up, mask=n < N)


@entry
def sum_pairs_kernel(
    y, out, ids, n, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ABSENT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ_k y[t · TOP_K + k], one block of columns of one token."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        place, end = y + (token * TOP_K + i) * n + cols, n
        if ABSENT:
            end = tl.where(tl.load(ids + token * TOP_K + i) >= 0, n, 0)
        total += tl.load(place, mask=cols < end, other=0.0).to(tl.float32)
    tl.store(out + token * n + cols, total.to(out.dtype.element_ty), mask=cols < n)
