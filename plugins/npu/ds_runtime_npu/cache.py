"""The layout latent_split, its cache ops, and what they share with attention.

The vendor's attention reads latents and rotated keys from tensors of their own and takes no gaps
between pages, so that one layer is two dense arrays in one storage: the tensor that is handed
around, [pages, page_size, kv_lora], is the first, and behind it lie a spare row and the keys
[pages, page_size, rope], with a spare row, too. What is padding is written to the spare rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_runtime.api import Facts, Segments, torch_dtype
from ds_runtime_npu.library import npu


class Parts(NamedTuple):
    """Views of one layer: latent [rows + 1, kv_lora], rope [rows + 1, rope]; the last is spare."""

    latent: Tensor
    rope: Tensor


def allocate(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """One layer's cache, zeroed: the view of its latents."""
    latent, rope = facts.dims["kv_lora"], facts.dims["qk_rope"]
    rows = num_pages * facts.page_size
    flat = torch.zeros(
        (rows + 1) * (latent + rope), dtype=torch_dtype(facts.kv_dtype), device=device
    )
    return flat[: rows * latent].view(num_pages, facts.page_size, latent)


def parts(cache: Tensor, rope: int) -> Parts:
    """Of the tensor that `allocate` gave."""
    pages, page, latent = cache.shape
    rows = pages * page + 1
    first = cache.as_strided((rows, latent), (latent, 1), 0)
    return Parts(first, cache.as_strided((rows, rope), (rope, 1), rows * latent))


def paged(cache: Tensor, rope: int) -> tuple[Tensor, Tensor]:
    """(latents [pages, page_size, kv_lora], keys [pages, page_size, rope]), both dense."""
    pages, page, _ = cache.shape
    return cache, parts(cache, rope).rope[:-1].view(pages, page, rope)


def _rope(cache: Tensor) -> int:
    """Width of the keys that lie behind the latents."""
    values = cache.untyped_storage().nbytes() // cache.element_size()
    return values // (cache.shape[0] * cache.shape[1] + 1) - cache.shape[2]


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """CacheWrite for latent_split."""
    if not slots.shape[0]:
        return
    held = parts(cache, k_rope.shape[1])
    spare = held.latent.shape[0] - 1
    places = torch.where(slots < 0, spare, slots).unsqueeze(1)
    for target, values in ((held.latent, latent), (held.rope, k_rope)):
        npu().npu_scatter_nd_update_(target, places, values.to(target.dtype).contiguous())


def cache_gather(
    cache: Tensor,
    page_table: Tensor,
    starts: Tensor,
    segs: Segments,
    kv_lora: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """CacheGather for latent_split."""
    held, page = parts(cache, _rope(cache)), cache.shape[1]
    lens = segs.cu.diff()
    owner = torch.repeat_interleave(lens, output_size=segs.total)
    inside = torch.arange(segs.total, device=cache.device) - segs.cu[owner]
    token = starts[owner] + inside
    rows = page_table[owner, token // page].to(torch.int64) * page + token % page
    return held.latent[rows].to(dtype), held.rope[rows].to(dtype)


def cache_move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """CacheMove for latent_split."""
    held = parts(cache, _rope(cache))
    spare = held.latent.shape[0] - 1
    old = torch.where(sources < 0, spare, sources)
    new = torch.where(sources < 0, spare, targets)
    for rows in held:
        rows[new] = rows[old]
