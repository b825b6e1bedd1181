"""The lightning indexer: norm, rotation, Hadamard and encoding of its vectors, and their scores.

FP8 index pages hold page_size · d bytes of keys, then page_size float32 scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.quant import group_scale, to_fp8


@triton.jit
def partners(col, rope, PAIRS: tl.constexpr):
    """(column that each is rotated with, place of its angle, sign of the partner's part)."""
    if PAIRS:
        first = col % 2 == 0
        other, angle = tl.where(first, col + 1, col - 1), col // 2
    else:
        half = rope // 2
        first = col < half
        other, angle = tl.where(first, col + half, col - half), tl.where(first, col, col - half)
    turned = col < rope
    return tl.where(turned, other, col), tl.where(turned, angle, 0), tl.where(first, -1.0, 1.0)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr):
    """Rows times Sylvester's matrix of size DIM = 2^STAGES, times DIM^-½.

    A stage adds and subtracts neighbours and moves the lowest bit of the place to the top. After
    STAGES of them every bit has been the lowest once and all are where they were.
    """
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, DIM))
    return x * DIM**-0.5


@entry
def index_prologue_kernel(
    q,
    k,
    norm_weight,
    norm_bias,
    positions,
    cos_sin,
    cache,
    key_scales,
    slots,
    q_out,
    scale_out,
    heads,
    rope,
    page_size,
    eps,
    q_token,
    q_head,
    k_token,
    cache_page,
    cache_row,
    scale_page,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRS: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS query heads of one token; the last program of a token does its key.

    key_scales: where the scales of page 0 begin, scale_page apart, in float32; unused unless FP8.
    """
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    col = tl.arange(0, DIM)
    other, angle, sign = partners(col, rope, PAIRS)
    turned = col < rope
    where = cos_sin + tl.load(positions + token) * rope + angle
    cos = tl.where(turned, tl.load(where), 1.0)
    sin = tl.where(turned, tl.load(where + rope // 2) * sign, 0.0)
    if block == tl.num_programs(1) - 1:
        slot = tl.load(slots + token)
        if slot >= 0:
            x = tl.load(k + token * k_token + col).to(tl.float32)
            swapped = tl.load(k + token * k_token + other).to(tl.float32)
            mean = tl.sum(x, 0) / DIM
            inverse = 1.0 / tl.sqrt(tl.sum((x - mean) * (x - mean), 0) / DIM + eps)
            x = (x - mean) * inverse * tl.load(norm_weight + col) + tl.load(norm_bias + col)
            weight, bias = tl.load(norm_weight + other), tl.load(norm_bias + other)
            swapped = (swapped - mean) * inverse * weight + bias
            x = hadamard((x * cos + swapped * sin)[None, :], 1, DIM, STAGES)
            page, row = slot // page_size, slot % page_size
            to = cache + page * cache_page + row * cache_row + col[None, :]
            if FP8:
                scale = group_scale(tl.max(tl.abs(x), 1), True)
                tl.store(to, to_fp8(x / scale[:, None], cache.dtype.element_ty))
                tl.store(key_scales + page * scale_page + row + tl.arange(0, 1), scale)
            else:
                tl.store(to, x.to(cache.dtype.element_ty))
    else:
        head = block * HEADS + tl.arange(0, HEADS)
        mask = (head < heads)[:, None]
        at = q + token * q_token + head[:, None] * q_head
        x = tl.load(at + col[None, :], mask=mask, other=0.0).to(tl.float32)
        swapped = tl.load(at + other[None, :], mask=mask, other=0.0).to(tl.float32)
        x = hadamard(x * cos[None, :] + swapped * sin[None, :], HEADS, DIM, STAGES)
        place = token * heads + head
        to = q_out + place[:, None] * DIM + col[None, :]
        if FP8:
            scale = group_scale(tl.max(tl.abs(x), 1), True)
            tl.store(to, to_fp8(x / scale[:, None], q_out.dtype.element_ty), mask=mask)
            tl.store(scale_out + place, scale, mask=head < heads)
        else:
            tl.store(to, x.to(q_out.dtype.element_ty), mask=mask)
            tl.store(scale_out + place, tl.full((HEADS,), 1.0, tl.float32), mask=head < heads)


@entry
def index_scores_kernel(
    q,
    weights,
    cache,
    key_scales,
    table,
    owners,
    lens,
    out,
    rows,
    heads,
    q_row,
    q_head,
    weight_row,
    cache_page,
    cache_row,
    scale_page,
    table_row,
    out_row,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of CHUNK tokens for ROWS neighbouring rows, which mostly are of one sequence.

    A tile is [BLOCK_N tokens, ROWS · HEADS], so that a token's heads are summed within few lanes.
    Keys of every sequence among the rows are read once; only its own rows are stored.
    """
    follow(PDL)
    first_row = tl.program_id(1) * ROWS
    begin = tl.program_id(0) * CHUNK
    lane = tl.arange(0, ROWS * HEADS)
    row, head = first_row + lane // HEADS, lane % HEADS
    real = (row < rows) & (head < heads)
    at = q + row.to(tl.int64) * q_row + head * q_head
    col = tl.arange(0, DIM)
    queries = tl.load(at[:, None] + col[None, :], mask=real[:, None], other=0.0)
    weight = tl.load(weights + row.to(tl.int64) * weight_row + head, mask=real, other=0.0)
    mine = first_row + tl.arange(0, ROWS)
    owner = tl.load(owners + mine, mask=mine < rows, other=-1)
    length = tl.load(lens + mine, mask=mine < rows, other=0)
    done = tl.full((), -1, tl.int32)
    for i in range(ROWS):
        sequence = tl.max(tl.where(mine == first_row + i, owner, -1), 0)
        if sequence > done:  # owners do not fall
            done = sequence
            seen = tl.where(owner == sequence, length, 0)
            end = tl.minimum(tl.max(seen, 0), begin + CHUNK)
            pages = table + sequence.to(tl.int64) * table_row
            for start in range(begin, end, BLOCK_N):
                token = start + tl.arange(0, BLOCK_N)
                inside = token < end
                page = tl.load(pages + token // PAGE, mask=inside, other=0).to(tl.int64)
                place = page * cache_page + (token % PAGE) * cache_row
                keys = tl.load(
                    cache + place[:, None] + col[None, :], mask=inside[:, None], other=0.0
                )
                dots = tl.dot(keys, tl.trans(queries), input_precision="ieee")
                dots = tl.maximum(dots, 0.0) * weight[None, :]
                if ROWS == 1:
                    score = tl.sum(dots, 1)[:, None]
                else:
                    score = tl.sum(tl.reshape(dots, (BLOCK_N, ROWS, HEADS)), 2)
                if FP8:
                    at_scale = key_scales + page * scale_page + token % PAGE
                    score = score * tl.load(at_scale, mask=inside, other=0.0)[:, None]
                to = out + mine.to(tl.int64)[None, :] * out_row + token[:, None]
                tl.store(to, score, mask=token[:, None] < seen[None, :])
