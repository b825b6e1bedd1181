"""The cache layout of FP8 latents with a scale per 128 and bfloat16 keys: write and gather."""

from __future__ import annotations

import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.quant import group_scale, to_fp8
from ds_runtime_triton.jit.sparse import GROUP, latents


@entry
def scaled_write_kernel(
    cache,
    scales,
    keys,
    latent,
    k_rope,
    slots,
    page_size,
    kv_lora,
    rope,
    cache_page,
    cache_row,
    scale_page,
    scale_row,
    key_page,
    key_row,
    latent_row,
    rope_row,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's row; a negative slot is padding. cache, scales, keys: of slot 0."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        page, row = slot // page_size, slot % page_size
        width: tl.constexpr = LATENT if LATENT < GROUP else GROUP
        group, inside = tl.arange(0, LATENT // width)[:, None], tl.arange(0, width)[None, :]
        col = group * GROUP + inside
        values = tl.load(latent + token * latent_row + col, mask=col < kv_lora, other=0.0)
        values = values.to(tl.float32)
        scale = group_scale(tl.max(tl.abs(values), 1), False)
        to = cache + page * cache_page + row * cache_row
        codes = to_fp8(tl.div_rn(values, scale[:, None] + tl.zeros_like(values)), tl.float8e4nv)
        tl.store(to + col, codes, mask=col < kv_lora)
        each = tl.arange(0, LATENT // width)
        to_scale = scales + page * scale_page + row * scale_row + each
        tl.store(to_scale, scale, mask=each * GROUP < kv_lora)
        col = tl.arange(0, ROPE)
        key = tl.load(k_rope + token * rope_row + col, mask=col < rope, other=0.0)
        to_key = keys + page * key_page + row * key_row + col
        tl.store(to_key, key.to(keys.dtype.element_ty), mask=col < rope)


@entry
def scaled_gather_kernel(
    cache,
    scales,
    keys,
    table,
    starts,
    cu,
    latent,
    k_rope,
    kv_lora,
    rope,
    cache_page,
    cache_row,
    scale_page,
    scale_row,
    key_page,
    key_row,
    table_row,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N rows of one sequence's range."""
    follow(PDL)
    sequence = tl.program_id(1)
    begin = tl.load(cu + sequence)
    count = tl.load(cu + sequence + 1) - begin
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.program_id(0) * BLOCK_N < count:
        real = place < count
        token = tl.load(starts + sequence) + place
        pages = table + sequence.to(tl.int64) * table_row
        page = tl.load(pages + token // PAGE, mask=real, other=0).to(tl.int64)
        row = token % PAGE
        values = latents(
            cache, scales, page, row, real, kv_lora, cache_page, cache_row, scale_page, scale_row,
            LATENT, True, False, BLOCK_N,
        )  # fmt: skip
        line, low = (begin + place).to(tl.int64)[:, None], tl.arange(0, LATENT)[None, :]
        inside = real[:, None] & (low < kv_lora)
        tl.store(latent + line * kv_lora + low, values.to(latent.dtype.element_ty), mask=inside)
        high = tl.arange(0, ROPE)[None, :]
        inside = real[:, None] & (high < rope)
        at = (keys + page * key_page + row * key_row)[:, None] + high
        key = tl.load(at, mask=inside, other=0.0).to(k_rope.dtype.element_ty)
        tl.store(k_rope + line * rope + high, key, mask=inside)
