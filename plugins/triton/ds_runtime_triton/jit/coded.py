"""Matmul with packed weights that become numbers on chip: one product, for linears and experts.

Columns come in spans of PLANES · WIDTH, a row's span being WIDTH words (jit/decode.py). The rows of
a span lie together, so that a tile reads one piece of memory. SCALES per span: 0 (only a row has
one), 1 (the sum over the span is multiplied), or one per plane (weights are, before the product).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.decode import (
    byte_scale,
    decode_bytes,
    decode_e2m1,
    decode_e4m3,
    decode_int4,
    decode_int8,
)
from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.experts import is_here, place_of, tile_rows
from ds_runtime_triton.jit.gemm import row_side, store_tile, tile_place, token_side
from ds_runtime_triton.jit.small import silu


@triton.jit
def product_into(acc, x, w, SWAP: tl.constexpr):
    """acc plus x [tokens, k] times w [rows, k] transposed, or its transpose."""
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def tokens_at(at, k, K, EVEN: tl.constexpr):
    """Columns k of some tokens; those outside 0 … K − 1 are zero."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=((k >= 0) & (k < K))[None, :], other=0.0)


@triton.jit
def number(values, PTX: tl.constexpr):
    """In float32, with PTX in bfloat16."""
    if PTX:
        return values.to(tl.float32).to(tl.bfloat16)
    else:
        return values.to(tl.float32)


@triton.jit
def plane_scale(
    at, words, plane: tl.constexpr, N, SCALES: tl.constexpr, SHIFT: tl.constexpr,
    MORE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """[rows, 1] float32, with PTX bfloat16. words: the bytes of all planes of a span; at: pointers
    to numbers."""
    if SCALES < 2:
        if PTX:  # 2^MORE
            made = tl.full((1, 1), (127 + MORE) * 128, tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            made = tl.full((1, 1), 1.0, tl.float32)
        return made
    elif SHIFT > 0:
        byte = (words.to(tl.int32) >> (8 * plane)) & 255
        return byte_scale(byte, SHIFT, MORE, PTX)[:, None]
    else:
        return number(tl.load(at + plane * N), PTX)[:, None]


@triton.jit
def plane_zero(
    at, plane: tl.constexpr, N, SCALES: tl.constexpr, ASYM: tl.constexpr, NONE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """[rows, 1]: what is subtracted from codes. NONE: where nothing is given."""
    if ASYM:
        return number(tl.load(at + (plane * N if SCALES > 1 else 0)), PTX)[:, None]
    else:
        return number(tl.full((1, 1), NONE, tl.int8), PTX)


@triton.jit
def span_of_numbers(
    acc, word, x_at, k, K, scale_at, scales, zero_at, N,
    CODES: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr,
    SHIFT: tl.constexpr, ASYM: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """acc plus the product with one span, in the tokens' dtype."""
    if CODES == 0:
        more: tl.constexpr = 0
    elif CODES == 1:
        more: tl.constexpr = 126
    else:
        more: tl.constexpr = 120
    a0 = tokens_at(x_at, k, K, EVEN)
    a1 = tokens_at(x_at + WIDTH, k + WIDTH, K, EVEN)
    s0 = plane_scale(scale_at, scales, 0, N, SCALES, SHIFT, more, PTX)
    s1 = plane_scale(scale_at, scales, 1, N, SCALES, SHIFT, more, PTX)
    if PLANES == 2:
        if CODES == 3:
            z0 = plane_zero(zero_at, 0, N, SCALES, ASYM, 0, PTX)
            z1 = plane_zero(zero_at, 1, N, SCALES, ASYM, 0, PTX)
            w0, w1 = decode_int8(word, z0, z1, s0, s1, dtype)
        else:
            w0, w1 = decode_e4m3(word, s0, s1, PTX, dtype)
        acc = product_into(acc, a0, w0, SWAP)
        return product_into(acc, a1, w1, SWAP)
    else:
        a2 = tokens_at(x_at + 2 * WIDTH, k + 2 * WIDTH, K, EVEN)
        a3 = tokens_at(x_at + 3 * WIDTH, k + 3 * WIDTH, K, EVEN)
        s2 = plane_scale(scale_at, scales, 2, N, SCALES, SHIFT, more, PTX)
        s3 = plane_scale(scale_at, scales, 3, N, SCALES, SHIFT, more, PTX)
        if CODES == 0:
            z0 = plane_zero(zero_at, 0, N, SCALES, ASYM, 8, PTX)
            if SCALES < 2:
                w0, w1, w2, w3 = decode_int4(
                    word, z0, z0, z0, z0, s0, s1, s2, s3, False, PTX, dtype
                )
            else:
                z1 = plane_zero(zero_at, 1, N, SCALES, ASYM, 8, PTX)
                z2 = plane_zero(zero_at, 2, N, SCALES, ASYM, 8, PTX)
                z3 = plane_zero(zero_at, 3, N, SCALES, ASYM, 8, PTX)
                w0, w1, w2, w3 = decode_int4(word, z0, z1, z2, z3, s0, s1, s2, s3, True, PTX, dtype)
        else:
            w0, w1, w2, w3 = decode_e2m1(word, s0, s1, s2, s3, PTX, dtype)
        acc = product_into(acc, a0, w0, SWAP)
        acc = product_into(acc, a1, w1, SWAP)
        acc = product_into(acc, a2, w2, SWAP)
        return product_into(acc, a3, w3, SWAP)


@triton.jit
def span_of_bytes(
    acc, word, x_at, k, K, x_scale, x_less, x_scale_at, x_less_at, tokens, scale_at, w_scale, N,
    SCALES: tl.constexpr, WIDTH: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """acc plus the product with one span of int4 codes, tokens and codes being e4m3. x_scale,
    x_less and w_scale: of its first scale."""
    low, high = decode_bytes(word, PTX, dtype)
    a0 = tokens_at(x_at, k, K, EVEN)
    a1 = tokens_at(x_at + WIDTH, k + WIDTH, K, EVEN)
    part = product_into(tl.zeros(acc.shape, tl.float32), a0, low, SWAP)
    if SCALES == 1:
        part = product_into(part, a1, high, SWAP)
        whole = part * token_side(x_scale, SWAP) - token_side(x_less, SWAP)
        return acc + whole * row_side(w_scale, SWAP)
    else:
        first, second = tl.load(scale_at), tl.load(scale_at + N)
        whole = part * token_side(x_scale, SWAP) - token_side(x_less, SWAP)
        acc += whole * row_side(first, SWAP)
        x_scale, x_less = tl.load(x_scale_at + tokens), tl.load(x_less_at + tokens)
        part = product_into(tl.zeros(acc.shape, tl.float32), a1, high, SWAP)
        whole = part * token_side(x_scale, SWAP) - token_side(x_less, SWAP)
        return acc + whole * row_side(second, SWAP)


@triton.jit
def coded_product(
    x, x_rows, x_scale, x_less, token, tokens, words, scale, zero, row_scale, n, N, K, lead, spans,
    first, last,
    CODES: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr,
    SPANS_PER_SCALE: tl.constexpr, SHIFT: tl.constexpr, ASYM: tl.constexpr, ROWS: tl.constexpr,
    A8: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tokens at x_rows times weight rows n, over spans first … last − 1: fp32 [BLOCK_M, BLOCK_N],
    or with SWAP its transpose. STEP spans are taken at once; it divides last − first.

    words [spans, N, WIDTH]; zero [groups, N] int8; row_scale [N]. scale: [groups, N], or of bytes
    [spans, N] with those of a span in one word. lead: columns of nothing before the first. A8: x is
    e4m3 with x_scale and x_less [groups, tokens], see quantise_kernel.
    """
    span_columns: tl.constexpr = PLANES * WIDTH
    groups: tl.constexpr = SCALES if SHIFT == 0 else 1  # rows of `scale` per span
    lane = tl.arange(0, WIDTH)
    w_at = words + n[:, None] * WIDTH + lane[None, :]
    x_at = x + x_rows[:, None] + (lane - lead)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    ahead: tl.constexpr = SCALES == 1 or SHIFT > 0
    # Scales are read one span ahead: nothing else hides their latency.
    scales = tl.zeros((BLOCK_N,), scale.dtype.element_ty)
    if ahead:
        scales = tl.load(scale + (tl.minimum(first, spans - 1) // SPANS_PER_SCALE) * N + n)
    scale_step, token_scale, token_less = SCALES * tokens, 0.0, 0.0
    if A8:
        own = tl.minimum(first, spans - 1) * scale_step + token
        token_scale, token_less = tl.load(x_scale + own), tl.load(x_less + own)
    for begin in range(first, last, STEP):
        for i in tl.static_range(STEP):
            span = begin + i
            word = tl.load(w_at + tl.cast(span, tl.int64) * (N * WIDTH))
            k = span * span_columns + lane - lead
            group = (span // SPANS_PER_SCALE) * groups
            scale_at = scale + group * N + n
            next = tl.minimum(span + 1, spans - 1)
            next_scales = scales
            if ahead:
                next_scales = tl.load(scale + (next // SPANS_PER_SCALE) * N + n)
            if A8:
                own = next * scale_step + token
                next_scale, next_less = tl.load(x_scale + own), tl.load(x_less + own)
                at = span * scale_step + token
                acc = span_of_bytes(
                    acc, word, x_at + span * span_columns, k, K, token_scale, token_less,
                    x_scale + at, x_less + at, tokens, scale_at, scales, N,
                    SCALES, WIDTH, SWAP, EVEN, PTX, dtype,
                )  # fmt: skip
                token_scale, token_less = next_scale, next_less
            elif SCALES == 1:
                part = span_of_numbers(
                    tl.zeros(acc.shape, tl.float32), word, x_at + span * span_columns, k, K,
                    scale_at, scales, zero + group * N + n, N, CODES, PLANES, WIDTH, SCALES, SHIFT,
                    ASYM, SWAP, EVEN, PTX, dtype,
                )  # fmt: skip
                acc += part * row_side(scales, SWAP)
            else:
                acc = span_of_numbers(
                    acc, word, x_at + span * span_columns, k, K, scale_at, scales,
                    zero + (span * SCALES) * N + n, N, CODES, PLANES, WIDTH, SCALES, SHIFT, ASYM,
                    SWAP, EVEN, PTX, dtype,
                )  # fmt: skip
            scales = next_scales
    if ROWS:
        acc *= row_side(tl.load(row_scale + n), SWAP)
    return acc


@entry
def coded_gemm_kernel(
    x, words, scale, zero, row_scale, y, partial, arrived, M, N, K, stride_x, lead, spans,
    CODES: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr,
    SPANS_PER_SCALE: tl.constexpr, SHIFT: tl.constexpr, ASYM: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, PTX: tl.constexpr, SWAP: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y = x · wᵀ."""
    follow(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile_place(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.minimum(m, M - 1)
    each = tl.cdiv(spans, SPLIT)
    acc = coded_product(
        x, token.to(tl.int64) * stride_x, row_scale, row_scale, token, M, words, scale, zero,
        row_scale, tl.minimum(n, N - 1), N, K, lead, spans, split * each,
        tl.minimum((split + 1) * each, spans),
        CODES, PLANES, WIDTH, SCALES, SPANS_PER_SCALE, SHIFT, ASYM, ROWS, False, SWAP, EVEN, PTX,
        1, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    store_tile(acc, y, m, n, M, N, partial, arrived, tile, split, SPLIT, SWAP, BLOCK_M, BLOCK_N)


@triton.jit
def gated(acc, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) · up, where rows of gate and up take turns."""
    if SWAP:
        pairs = tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1))
    else:
        pairs = tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2))
    gate, up = tl.split(pairs)
    return silu(gate) * up


@entry
def coded_experts_kernel(
    x, x_scale, x_less, words, scale, zero, row_scale, weights, out, order, owner, used, ids, pairs,
    tokens, N, K, stride_x, lead, spans, scale_rows,
    CODES: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr,
    SPANS_PER_SCALE: tl.constexpr, SHIFT: tl.constexpr, ASYM: tl.constexpr, ROWS: tl.constexpr,
    A8: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, SWAP: tl.constexpr,
    TOP_K: tl.constexpr, GATED: tl.constexpr, DIRECT: tl.constexpr, GROUP: tl.constexpr,
    STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ABSENT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The pairs of a tile (jit/experts.py) times one matrix of its expert, [experts, N, …].

    GATED: x holds tokens; out [pairs, N / 2] is silu(gate) · up of rows that take turns. Otherwise
    x holds pairs, and out [pairs, N] the product times the pair's weight. scale and zero have
    scale_rows · N numbers per expert.
    """
    follow(PDL)
    tiles_m = pairs
    if not DIRECT:
        tiles_m = tl.load(used)
    tile, tile_n = place_of(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP)
    if is_here(ids, tile, tiles_m, ABSENT):
        expert, pair, real = tile_rows(order, owner, ids, tile, pairs, BLOCK_M, DIRECT)
        row, rows = pair, pairs
        if GATED:
            row, rows = pair // TOP_K, tokens
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        at = expert * scale_rows * N
        acc = coded_product(
            x, row.to(tl.int64) * stride_x, x_scale, x_less, row, rows,
            words + expert * N * spans * WIDTH, scale + at, zero + at, row_scale + expert * N,
            tl.minimum(n, N - 1), N, K, lead, spans, 0, spans,
            CODES, PLANES, WIDTH, SCALES, SPANS_PER_SCALE, SHIFT, ASYM, ROWS, A8, SWAP, EVEN, PTX,
            STEP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        at_m, real_m = token_side(pair, SWAP), token_side(real, SWAP)
        if GATED:
            made = gated(acc, SWAP, BLOCK_M, BLOCK_N)
            at_n = row_side(tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), SWAP)
            width = N // 2
        else:
            made = acc * token_side(tl.load(weights + pair), SWAP)
            at_n, width = row_side(n, SWAP), N
        to = out + at_m.to(tl.int64) * width + at_n
        tl.store(to, made.to(out.dtype.element_ty), mask=real_m & (at_n < width))
