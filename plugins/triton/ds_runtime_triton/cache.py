"""Rope, CacheWrite, CacheGather and MlaPrologue over the layout `latent_pages`."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Segments
from ds_runtime_triton.jit.cache import (
    cache_gather_kernel,
    cache_move_kernel,
    cache_write_kernel,
    mla_prologue_kernel,
    rope_kernel,
)
from ds_runtime_triton.launch import cdiv, pow2

_HEADS = 16  # heads of one program
_ROWS = 8  # cache rows of one program


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rope: one program per token and block of heads, one more for the key."""
    tokens, heads, d = q.shape
    q_out = torch.empty(tokens, heads, d, dtype=q.dtype, device=q.device)
    k_out = torch.empty(tokens, d, dtype=k.dtype, device=k.device)
    if tokens:
        block = min(_HEADS, pow2(heads))
        rope_kernel[(tokens, cdiv(heads, block) + 1)](
            q, k, positions, cos_sin, q_out, k_out, heads, d, *q.stride()[:2], k.stride(0),
            block, pow2(d // 2), num_warps=1,
        )  # fmt: skip
    return q_out, k_out


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """CacheWrite: one program per token."""
    tokens, kv_lora = latent.shape
    if tokens:
        width = k_rope.shape[1]
        cache_write_kernel[(tokens,)](
            cache, latent, k_rope, slots, cache.shape[1], kv_lora, width, *cache.stride()[:2],
            latent.stride(0), k_rope.stride(0), pow2(kv_lora), pow2(width), num_warps=1,
        )  # fmt: skip


def cache_move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """CacheMove: one program per sequence, which moves one entry after the other."""
    sequences, count = sources.shape
    if sequences and count:
        entries = cache.view(torch.uint8) if cache.element_size() == 1 else cache.view(torch.int16)
        if cache.element_size() == 4:
            entries = cache.view(torch.int32)
        cache_move_kernel[(sequences,)](
            entries, sources, targets, count, cache.shape[1], entries.shape[2],
            *entries.stride()[:2], sources.stride(0), targets.stride(0), pow2(entries.shape[2]),
            num_warps=4,
        )  # fmt: skip


def cache_gather(
    cache: Tensor,
    page_table: Tensor,
    starts: Tensor,
    segs: Segments,
    kv_lora: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """CacheGather: one program per block of rows of a sequence."""
    width = cache.shape[2]
    out = torch.empty(segs.total, width, dtype=dtype, device=cache.device)
    if segs.total:
        cache_gather_kernel[(cdiv(segs.longest, _ROWS), len(segs.lens))](
            cache, page_table, starts, segs.cu, out, cache.shape[1], width, *cache.stride()[:2],
            page_table.stride(0), _ROWS, pow2(width), num_warps=4,
        )  # fmt: skip
    return out[:, :kv_lora], out[:, kv_lora:]


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
    """MlaPrologue: one launch; a program per token and block of heads, one more for kv."""
    (tokens, heads, d), kv_lora = q.shape, norm_weight.shape[0]
    width = kv.shape[1] - kv_lora
    q_out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    latent = torch.empty(tokens, kv_lora, dtype=kv.dtype, device=q.device)
    k_out = torch.empty(tokens, width, dtype=kv.dtype, device=q.device)
    if tokens:
        block = min(_HEADS, pow2(heads))
        mla_prologue_kernel[(tokens, cdiv(heads, block) + 1)](
            q, kv, norm_weight, positions, cos_sin, cache, slots, q_out, latent, k_out,
            heads, d - width, kv_lora, width, cache.shape[1], eps, *q.stride()[:2], kv.stride(0),
            *cache.stride()[:2], block, pow2(width // 2), pow2(kv_lora), num_warps=1,
        )  # fmt: skip
    return q_out, latent, k_out
