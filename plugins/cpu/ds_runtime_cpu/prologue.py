"""Native rotation and cache write, and both with the latent norm in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_cpu.native import active
from ds_runtime_cpu.small import CACHE, CODE, in_rows


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rope for float32 and bfloat16."""
    rows, heads, d = q.shape
    assert k.shape == (rows, d) and q.dtype == k.dtype, (q.shape, k.shape, q.dtype, k.dtype)
    q, k, (positions, cos_sin) = in_rows(q), in_rows(k), _looked_up(positions, cos_sin, rows, d)
    q_out, k_out = q.new_empty(rows, heads, d), k.new_empty(rows, d)
    code, call = CODE[q.dtype], active.rope
    where, table = positions.data_ptr(), cos_sin.data_ptr()
    by_row, by_head, _ = q.stride()
    call(code, q.data_ptr(), by_row, by_head, where, table, q_out.data_ptr(), rows, heads, d)
    call(code, k.data_ptr(), k.stride()[0], 0, where, table, k_out.data_ptr(), rows, 1, d)
    return q_out, k_out


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """CacheWrite for latent_pages in the compute dtype or in float8_e4m3fn, and for
    latent_fp8_groups."""
    rows, lora = latent.shape
    latent, k_rope, slots = in_rows(latent), in_rows(k_rope), _slots(cache, slots, rows)
    active.cache_write(
        CODE[latent.dtype],
        CACHE[cache.dtype],
        cache.data_ptr(),
        lora + k_rope.shape[1],
        latent.data_ptr(),
        latent.stride()[0],
        lora,
        k_rope.data_ptr(),
        k_rope.stride()[0],
        slots.data_ptr(),
        rows,
    )


def mla_prologue(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """MlaPrologue for latent_pages in the compute dtype or in float8_e4m3fn, and for
    latent_fp8_groups."""
    rows, heads, head = q.shape
    width, lora = kv.shape[1], norm_weight.shape[0]
    rope_dim, dtype = width - lora, q.dtype
    q, kv, norm_weight = in_rows(q), in_rows(kv), norm_weight.contiguous()
    positions, cos_sin = _looked_up(positions, cos_sin, rows, rope_dim)
    slots = _slots(cache, slots, rows)
    q_rope = q.new_empty(rows, heads, rope_dim)
    latent = q.new_empty(rows, lora)
    k_rope = q.new_empty(rows, rope_dim)
    by_row, by_head, _ = q.stride()
    active.mla_prologue(
        CODE[dtype],
        CODE[norm_weight.dtype],
        CACHE[cache.dtype],
        q.data_ptr() + (head - rope_dim) * dtype.itemsize,
        by_row,
        by_head,
        heads,
        kv.data_ptr(),
        kv.stride()[0],
        lora,
        rope_dim,
        norm_weight.data_ptr(),
        eps,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cache.data_ptr(),
        slots.data_ptr(),
        q_rope.data_ptr(),
        latent.data_ptr(),
        k_rope.data_ptr(),
        rows,
    )
    return q_rope, latent, k_rope


def _looked_up(positions: Tensor, cos_sin: Tensor, rows: int, d: int) -> tuple[Tensor, Tensor]:
    assert positions.dtype == torch.int64 and positions.shape == (rows,), positions
    assert cos_sin.dtype == torch.float32 and cos_sin.shape[1] == d, (cos_sin.dtype, d)
    return positions.contiguous(), cos_sin.contiguous()


def _slots(cache: Tensor, slots: Tensor, rows: int) -> Tensor:
    assert slots.dtype == torch.int64 and slots.shape == (rows,), slots
    assert cache.is_contiguous(), cache.stride()
    return slots.contiguous()


# Of the other layout: kernels that are offered apart have names of their own.
scaled_cache_write, scaled_mla_prologue = cache_write, mla_prologue
