"""SparseMla over `latent_pages` and over `latent_fp8_groups`, for prefill and decode rows."""

from __future__ import annotations

from math import e, log2

import torch
from torch import Tensor

from ds_runtime_triton.config import folder, tuned
from ds_runtime_triton.jit.sparse import sparse_mla_kernel
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.machine import architecture, cores
from ds_runtime_triton.mla import combine
from ds_runtime_triton.scaled import Scaled
from ds_runtime_triton.workspace import SPLITS


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla over latent_pages."""
    strides = cache.stride()[:2]
    return _attend(q, (cache, cache, cache[..., kv_lora:]), strides * 3, cache, slots, kv_lora,
                   scale, "plain")  # fmt: skip


def scaled_sparse_mla(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
) -> Tensor:
    """SparseMla over latent_fp8_groups."""
    held = Scaled.of(cache, kv_lora)
    return _attend(q, held.parts, held.strides, cache, slots, kv_lora, scale, "grouped")


def _attend(
    q: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    strides: tuple[int, ...],
    cache: Tensor,
    slots: Tensor,
    kv_lora: int,
    scale: float,
    kind: str,
) -> Tensor:
    """One launch where rows fill the device, else two: every row's slots are then split."""
    (rows, heads, width), count = q.shape, slots.shape[1]
    out = torch.empty(rows, heads, kv_lora, dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    rope = width - kv_lora
    arch = folder(architecture(), str(q.dtype).removeprefix("torch."))
    config = dict(tuned(arch, "sparse_mla", kind).at(rows * heads))
    blocks = cdiv(heads, config["BLOCK_H"])
    step = config["BLOCK_N"]
    free = cores() * config.pop("WAVES") // (rows * blocks)
    share = cdiv(cdiv(count, max(1, min(free, SPLITS))), step) * step
    splits = cdiv(count, share)
    size = rows * heads * splits if splits > 1 else 1
    partial = torch.empty(size, kv_lora, dtype=torch.float32, device=q.device)
    sums = torch.empty(size, dtype=torch.float32, device=q.device)
    low, high = pow2(kv_lora, 16), pow2(rope, 16)
    sparse_mla_kernel[(blocks, splits, rows)](
        q, *parts, slots, out, partial, sums, heads, kv_lora, rope, count, share,
        scale * log2(e), *q.stride(), slots.stride(0), *strides, PAGE=cache.shape[1],
        SPLITS=splits, LATENT=low, ROPE=high, GROUPED=kind == "grouped",
        EXACT=low == kv_lora and high == rope, **config,
    )  # fmt: skip
    if splits > 1:
        combine(partial, sums, None, out, splits, step)
    return out
