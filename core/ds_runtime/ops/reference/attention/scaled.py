"""Torch references of the layout `latent_fp8_groups`: FP8 latents with a scale per 128 of them.

One layer is uint8 [pages, page_size, bytes]. A token has the latent in e4m3, a float32 scale per
128 of its elements (amax / 448), then the rotated key in bfloat16. That is 656 bytes at DeepSeek's
widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Segments
from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import fp8_vectors, wide
from ds_runtime.ops.reference.attention.cache import cache_move, gather_rows
from ds_runtime.ops.reference.attention.sparse import attend_slots

GROUP = 128


def token_bytes(kv_lora: int, rope_dim: int) -> int:
    """Bytes of one token."""
    return kv_lora + 4 * -(-kv_lora // GROUP) + 2 * rope_dim


def allocate_latent_fp8_groups(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """One layer's cache, zeroed."""
    each = token_bytes(facts.dims["kv_lora"], facts.dims["qk_rope"])
    return torch.zeros(num_pages, facts.page_size, each, dtype=torch.uint8, device=device)


def encoded(latent: Tensor, k_rope: Tensor) -> Tensor:
    """[n, kv_lora] and [n, rope] as bytes: [n, token_bytes]."""
    rows, kv_lora = latent.shape
    groups = -(-kv_lora // GROUP)
    whole = torch.nn.functional.pad(latent.to(wide(latent.dtype)), (0, groups * GROUP - kv_lora))
    codes, scale = fp8_vectors(whole.view(rows, groups, GROUP), ue8m0=False)
    codes = codes.view(torch.uint8).reshape(rows, groups * GROUP)[:, :kv_lora]
    scales, keys = _fresh(scale, torch.float32), _fresh(k_rope, torch.bfloat16)
    return torch.cat((codes, scales.view(torch.uint8), keys.view(torch.uint8)), dim=1)


def _fresh(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that can be viewed as another dtype, also where it is empty."""
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def decoded(rows: Tensor, kv_lora: int) -> Tensor:
    """Bytes [..., token_bytes] as float32 [..., kv_lora + rope]."""
    groups = -(-kv_lora // GROUP)
    latent, scales, keys = rows.tensor_split((kv_lora, kv_lora + 4 * groups), dim=-1)
    latent = _fresh(latent, torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    scales = _fresh(scales, torch.uint8).view(torch.float32)
    keys = _fresh(keys, torch.uint8).view(torch.bfloat16)
    scales = scales.repeat_interleave(GROUP, dim=-1)[..., :kv_lora]
    return torch.cat((latent * scales, keys.to(torch.float32)), dim=-1)


def scaled_cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """CacheWrite for latent_fp8_groups."""
    real = slots >= 0
    page, row = slots[real] // cache.shape[1], slots[real] % cache.shape[1]
    cache[page, row] = encoded(latent[real], k_rope[real])


def scaled_cache_gather(
    cache: Tensor,
    page_table: Tensor,
    starts: Tensor,
    segs: Segments,
    kv_lora: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """CacheGather for latent_fp8_groups."""
    rows = [cache.new_empty(0, cache.shape[2])]
    for pages, start, length in zip(page_table, starts.tolist(), segs.lens, strict=True):
        rows.append(gather_rows(cache, pages, start, length))
    dense = decoded(torch.cat(rows), kv_lora).to(dtype)
    return dense[:, :kv_lora], dense[:, kv_lora:]


def scaled_sparse_mla(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
) -> Tensor:
    """SparseMla for latent_fp8_groups."""
    rows = cache.flatten(0, 1)
    return attend_slots(q, slots, kv_lora, scale, lambda chosen: decoded(rows[chosen], kv_lora))


def scaled_cache_move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Reference of CacheMove for latent_fp8_groups, whose rows are copied as they are."""
    cache_move(cache, sources, targets)
