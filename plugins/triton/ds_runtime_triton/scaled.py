"""The layout `latent_fp8_groups`: its parts, and CacheWrite, CacheGather and CacheMove over it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ds_runtime.api import Segments
from ds_runtime_triton.cache import cache_move
from ds_runtime_triton.jit.scaled import scaled_gather_kernel, scaled_write_kernel
from ds_runtime_triton.launch import cdiv, pow2

GROUP = 128
_ROWS = 8  # cache rows of one program


class Scaled(NamedTuple):
    """One layer's cache as three tensors that begin where codes, scales and keys of slot 0 do, and
    the strides of pages and rows of each."""

    parts: tuple[Tensor, Tensor, Tensor]
    strides: tuple[int, ...]

    @staticmethod
    def of(cache: Tensor, kv_lora: int) -> Scaled:
        """cache: uint8 [pages, page_size, bytes]. kv_lora is a multiple of 4."""
        flat, keys = cache.view(-1), kv_lora + 4 * cdiv(kv_lora, GROUP)
        parts = (
            flat.view(torch.float8_e4m3fn),
            flat[kv_lora:].view(torch.float32),
            flat[keys:].view(torch.bfloat16),
        )
        page, row = cache.stride()[:2]
        return Scaled(parts, (page, row, page // 4, row // 4, page // 2, row // 2))


def scaled_cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """CacheWrite: one program per token."""
    tokens, kv_lora = latent.shape
    if tokens:
        held, width = Scaled.of(cache, kv_lora), k_rope.shape[1]
        scaled_write_kernel[(tokens,)](
            *held.parts, latent, k_rope, slots, cache.shape[1], kv_lora, width, *held.strides,
            latent.stride(0), k_rope.stride(0), LATENT=pow2(kv_lora), ROPE=pow2(width),
            num_warps=1,
        )  # fmt: skip


def scaled_cache_gather(
    cache: Tensor,
    page_table: Tensor,
    starts: Tensor,
    segs: Segments,
    kv_lora: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """CacheGather: one program per block of rows of a sequence."""
    held = Scaled.of(cache, kv_lora)
    width = (cache.shape[2] - kv_lora - 4 * cdiv(kv_lora, GROUP)) // 2
    latent = torch.empty(segs.total, kv_lora, dtype=dtype, device=cache.device)
    k_rope = torch.empty(segs.total, width, dtype=dtype, device=cache.device)
    if segs.total:
        scaled_gather_kernel[(cdiv(segs.longest, _ROWS), len(segs.lens))](
            *held.parts, page_table, starts, segs.cu, latent, k_rope, kv_lora, width,
            *held.strides, page_table.stride(0), PAGE=cache.shape[1], BLOCK_N=_ROWS,
            LATENT=pow2(kv_lora), ROPE=pow2(width), num_warps=4,
        )  # fmt: skip
    return latent, k_rope


def scaled_cache_move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """CacheMove: rows are copied as they are."""
    cache_move(cache, sources, targets)
