"""Multi-head attention over sequences of any length, with log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow


@triton.jit
def columns_of(at, col, width, EXACT: tl.constexpr):
    """Rows at `at`, of which columns from `width` on are zeros. EXACT: there are none."""
    if EXACT:
        block = tl.load(at)
    else:
        block = tl.load(at, mask=(col < width)[None, :], other=0.0)
    return block


@triton.jit
def attend(
    acc,
    top,
    total,
    q,
    q_rest,
    q_rope,
    k_rows,
    rope_rows,
    v_rows,
    stride_k,
    stride_rope,
    stride_v,
    first,
    last,
    keys,
    seen,
    scale,
    d_nope,
    d_rope,
    d_v,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    NOPE: tl.constexpr,
    REST: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys [first, last) in blocks. MASKED: some may be beyond `seen`, the last key of each row;
    the last of all, keys - 1, is read in their place. Scores are in powers of two, and scale is
    positive; EXACT: NOPE + REST, ROPE and V are the widths. q_rest: the columns of q from NOPE on,
    if there are REST of them."""
    nope, rope, out = tl.arange(0, NOPE), tl.arange(0, ROPE), tl.arange(0, V)
    for start in range(first, last, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        own = (tl.minimum(col, keys - 1) if MASKED else col)[:, None]
        k_at = k_rows + own * stride_k
        k = columns_of(k_at + nope[None, :], nope, d_nope, EXACT)
        k_rope = columns_of(rope_rows + own * stride_rope + rope[None, :], rope, d_rope, EXACT)
        v = columns_of(v_rows + own * stride_v + out[None, :], out, d_v, EXACT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST:
            rest = NOPE + tl.arange(0, REST)
            k_rest = columns_of(k_at + rest[None, :], rest, d_nope, EXACT)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(col[None, :] <= seen[:, None], scores, float("-inf"))
        above = tl.maximum(top, tl.max(scores, 1) * scale)
        base = tl.where(above == float("-inf"), 0.0, above)  # no key seen yet: weights are 0
        weights = tl.exp2(scores * scale - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = above
    return acc, top, total


@entry
def mha_prefill_kernel(
    q,
    q_rope,
    k,
    k_rope,
    v,
    q_cu,
    k_cu,
    out,
    lse,
    heads,
    d_nope,
    d_rope,
    d_v,
    scale,
    q_row,
    q_head,
    q_rope_row,
    q_rope_head,
    k_row,
    k_head,
    k_rope_row,
    v_row,
    v_head,
    CAUSAL: tl.constexpr,
    EXACT: tl.constexpr,
    NOPE: tl.constexpr,
    REST: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M queries of one head of one sequence; the longest rows start first. `scale` holds
    log2(e). q_row … v_head are strides. SPLIT: keys that every row sees have a loop of their own,
    without masks, which pays where there are many; one loop's loads are never interrupted."""
    follow(PDL)
    sequence, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    q_begin = tl.load(q_cu + sequence)
    queries = tl.load(q_cu + sequence + 1) - q_begin
    if block * BLOCK_M < queries:
        k_begin = tl.load(k_cu + sequence)
        keys = tl.load(k_cu + sequence + 1) - k_begin
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        nope, rope, wide = tl.arange(0, NOPE), tl.arange(0, ROPE), tl.arange(0, V)
        token = (q_begin + tl.minimum(row, queries - 1)).to(tl.int64)[:, None]
        q_at = q + token * q_row + head * q_head
        rope_at = q_rope + token * q_rope_row + head * q_rope_head + rope[None, :]
        own = columns_of(q_at + nope[None, :], nope, d_nope, EXACT)
        own_rope = columns_of(rope_at, rope, d_rope, EXACT)
        own_rest = own  # which nothing reads
        if REST:
            rest = NOPE + tl.arange(0, REST)
            own_rest = columns_of(q_at + rest[None, :], rest, d_nope, EXACT)
        k_rows = k + k_begin.to(tl.int64) * k_row + head * k_head
        rope_rows = k_rope + k_begin.to(tl.int64) * k_rope_row
        v_rows = v + k_begin.to(tl.int64) * v_row + head * v_head
        shift = keys - queries  # query j sees keys up to j + shift
        last, plain, seen = keys, (keys // BLOCK_N) * BLOCK_N, keys - 1 + 0 * row
        if CAUSAL:
            last = tl.minimum(keys, tl.maximum((block + 1) * BLOCK_M + shift, 0))
            begin = tl.maximum(block * BLOCK_M + shift + 1, 0)  # all rows see the keys before
            plain = tl.minimum((begin // BLOCK_N) * BLOCK_N, plain)
            seen = tl.minimum(row + shift, seen)
        acc = tl.zeros((BLOCK_M, V), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc, top, total = attend(
            acc, top, total, own, own_rest, own_rope, k_rows, rope_rows, v_rows, k_row, k_rope_row,
            v_row, plain if SPLIT else 0, last, keys, seen, scale, d_nope, d_rope, d_v, True,
            EXACT, NOPE, REST, ROPE, V, BLOCK_N,
        )  # fmt: skip
        if SPLIT:
            acc, top, total = attend(
                acc, top, total, own, own_rest, own_rope, k_rows, rope_rows, v_rows, k_row,
                k_rope_row, v_row, 0, plain, keys, seen, scale, d_nope, d_rope, d_v, False,
                EXACT, NOPE, REST, ROPE, V, BLOCK_N,
            )  # fmt: skip
        some = total > 0.0
        acc = acc * tl.where(some, 1.0 / total, 0.0)[:, None]
        real = (row < queries)[:, None]
        at = (q_begin + row).to(tl.int64) * heads + head
        to = out + at[:, None] * d_v + wide[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real & (wide < d_v)[None, :])
        natural = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse + at, tl.where(some, natural, float("-inf")), mask=row < queries)
