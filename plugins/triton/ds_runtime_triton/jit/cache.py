"""Rotation and the paged latent cache: a cache row is the latent, then the rotated key."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.quant import to_fp8


@triton.jit
def stored(values, dtype: tl.constexpr):
    """Values as the cache holds them: saturated where that is e4m3, untouched if it is theirs."""
    if dtype == tl.float8e4nv:
        return to_fp8(values.to(tl.float32), dtype)
    return values.to(dtype)


@triton.jit
def turned(place, cos, sin, mask):
    """The pairs at the pointers `place` of their first halves, turned, in fp32."""
    a = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(place + 1, mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def angles(table, pair, half):
    """(cos, sin) of each pair from one position's row of the table."""
    where = table + pair
    cos = tl.load(where, mask=pair < half, other=0.0)
    sin = tl.load(where + half, mask=pair < half, other=0.0)
    return cos, sin


@triton.jit
def turn_heads(
    q,
    q_out,
    token,
    block,
    heads,
    d,
    stride_head,
    cos,
    sin,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """HEADS heads of a token whose first value to turn is at q; q_out: [tokens, heads, d].

    Whole rows are read and written: pairs part in registers.
    """
    head = block * HEADS + tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, 2 * PAIRS)[None, :]
    mask = (head < heads) & (col < d)
    values = tl.load(q + head * stride_head + col, mask=mask, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(values, (HEADS, PAIRS, 2)))
    cos, sin = cos[None, :], sin[None, :]
    both = tl.join(a * cos - b * sin, b * cos + a * sin)
    to = q_out + (token * heads + head) * d + col
    tl.store(to, tl.reshape(both, (HEADS, 2 * PAIRS)).to(q_out.dtype.element_ty), mask=mask)


@entry
def rope_kernel(
    q,
    k,
    positions,
    cos_sin,
    q_out,
    k_out,
    heads,
    d,
    q_token,
    q_head,
    k_token,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one token; the last program of a token turns its key."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = d // 2
    pair = tl.arange(0, PAIRS)
    cos, sin = angles(cos_sin + tl.load(positions + token) * d, pair, half)
    if block == tl.num_programs(1) - 1:
        mask = pair < half
        first, second = turned(k + token * k_token + 2 * pair, cos, sin, mask)
        to = k_out + token * d + 2 * pair
        tl.store(to, first.to(k_out.dtype.element_ty), mask=mask)
        tl.store(to + 1, second.to(k_out.dtype.element_ty), mask=mask)
    else:
        turn_heads(
            q + token * q_token, q_out, token, block, heads, d, q_head, cos, sin, HEADS, PAIRS
        )


@entry
def cache_write_kernel(
    cache,
    latent,
    k_rope,
    slots,
    page_size,
    kv_lora,
    rope,
    cache_page,
    cache_row,
    latent_row,
    rope_row,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's row; a negative slot is padding."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        to = cache + (slot // page_size) * cache_page + (slot % page_size) * cache_row
        cols = tl.arange(0, LATENT)
        values = tl.load(latent + token * latent_row + cols, mask=cols < kv_lora, other=0.0)
        tl.store(to + cols, stored(values, cache.dtype.element_ty), mask=cols < kv_lora)
        cols = tl.arange(0, ROPE)
        values = tl.load(k_rope + token * rope_row + cols, mask=cols < rope, other=0.0)
        tl.store(to + kv_lora + cols, stored(values, cache.dtype.element_ty), mask=cols < rope)


@entry
def cache_gather_kernel(
    cache,
    page_table,
    starts,
    cu,
    out,
    page_size,
    width,
    cache_page,
    cache_row,
    table_row,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK rows of one sequence's range."""
    follow(PDL)
    sequence = tl.program_id(1)
    begin = tl.load(cu + sequence)
    count = tl.load(cu + sequence + 1) - begin
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK < count:
        token = tl.load(starts + sequence) + row
        table = page_table + sequence.to(tl.int64) * table_row
        page = tl.load(table + token // page_size, mask=row < count, other=0).to(tl.int64)
        place = page * cache_page + (token % page_size) * cache_row
        cols = tl.arange(0, WIDTH)
        mask = (row < count)[:, None] & (cols < width)[None, :]
        values = tl.load(cache + place[:, None] + cols[None, :], mask=mask, other=0.0)
        to = out + (begin + row).to(tl.int64)[:, None] * width + cols[None, :]
        tl.store(to, values.to(out.dtype.element_ty), mask=mask)


@entry
def mla_prologue_kernel(
    q,
    kv,
    norm_weight,
    positions,
    cos_sin,
    cache,
    slots,
    q_out,
    latent_out,
    k_out,
    heads,
    nope,
    kv_lora,
    rope,
    page_size,
    eps,
    q_token,
    q_head,
    kv_token,
    cache_page,
    cache_row,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    LATENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS query heads of one token; the last program of a token norms, turns and stores its
    latent and key."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = rope // 2
    pair = tl.arange(0, PAIRS)
    cos, sin = angles(cos_sin + tl.load(positions + token) * rope, pair, half)
    if block == tl.num_programs(1) - 1:
        cols = tl.arange(0, LATENT)
        values = tl.load(kv + token * kv_token + cols, mask=cols < kv_lora, other=0.0)
        values = values.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, 0) / kv_lora + eps)
        weight = tl.load(norm_weight + cols, mask=cols < kv_lora, other=0.0).to(tl.float32)
        normed = (values * inverse * weight).to(latent_out.dtype.element_ty)
        tl.store(latent_out + token * kv_lora + cols, normed, mask=cols < kv_lora)
        real = pair < half
        place = kv + token * kv_token + kv_lora + 2 * pair
        first, second = turned(place, cos, sin, real)
        first, second = first.to(k_out.dtype.element_ty), second.to(k_out.dtype.element_ty)
        to = k_out + token * rope + 2 * pair
        tl.store(to, first, mask=real)
        tl.store(to + 1, second, mask=real)
        slot = tl.load(slots + token)
        if slot >= 0:
            row = cache + (slot // page_size) * cache_page + (slot % page_size) * cache_row
            tl.store(row + cols, stored(normed, cache.dtype.element_ty), mask=cols < kv_lora)
            pairs = row + kv_lora + 2 * pair
            tl.store(pairs, stored(first, cache.dtype.element_ty), mask=real)
            tl.store(pairs + 1, stored(second, cache.dtype.element_ty), mask=real)
    else:
        begin = q + token * q_token + nope
        turn_heads(begin, q_out, token, block, heads, rope, q_head, cos, sin, HEADS, PAIRS)


@entry
def cache_move_kernel(
    cache,
    sources,
    targets,
    count,
    page_size,
    width,
    cache_page,
    cache_row,
    source_row,
    target_row,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The pairs of one sequence in their order: no source is the target of an earlier pair."""
    follow(PDL)
    sequence, col = tl.program_id(0), tl.arange(0, WIDTH)
    mask = col < width
    for i in range(count):
        old = tl.load(sources + sequence * source_row + i)
        if old >= 0:
            new = tl.load(targets + sequence * target_row + i)
            at = cache + (old // page_size) * cache_page + (old % page_size) * cache_row
            to = cache + (new // page_size) * cache_page + (new % page_size) * cache_row
            tl.store(to + col, tl.load(at + col, mask=mask), mask=mask)
