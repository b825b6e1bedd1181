"""The layout latent_split, its cache ops, and what they share with attention.

The vendor's attention reads latents and rotated keys from tensors of their own and takes no gaps
between pages. So one layer is two dense arrays in one storage. The first is the tensor that is
handed around, [pages, page_size, kv_lora]. After it come a spare page and the keys [pages,
page_size, rope], with a spare page, too. What is padding is written to the spare pages. Keys lie as
halves (all first values of their pairs, then all second ones), as npu_mla_prolog_v3 writes them:
queries are halved where they meet them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_runtime.api import Facts, Segments, torch_dtype
from ds_runtime_npu.library import npu


class Parts(NamedTuple):
    """Views of one layer's rows, spare ones last: latent [rows, kv_lora], rope [rows, rope]."""

    latent: Tensor
    rope: Tensor


def halves(x: Tensor) -> Tensor:
    """[..., d] of pairs (x0, x1), (x2, x3)… as (x0, x2, …, x1, x3, …): new and dense."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).flatten(-2)


def pairs(x: Tensor) -> Tensor:
    """The inverse of `halves`."""
    return x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).transpose(-1, -2).flatten(-2)


def allocate(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """One layer's cache, zeroed: the view of its latents."""
    latent, rope = facts.dims["kv_lora"], facts.dims["qk_rope"]
    rows = (num_pages + 1) * facts.page_size
    flat = torch.zeros(rows * (latent + rope), dtype=torch_dtype(facts.kv_dtype), device=device)
    shape = num_pages, facts.page_size, latent
    return flat[: num_pages * facts.page_size * latent].view(shape)


def parts(cache: Tensor, rope: int) -> Parts:
    """Of the tensor that `allocate` gave."""
    pages, page, latent = cache.shape
    rows = (pages + 1) * page
    first = cache.as_strided((rows, latent), (latent, 1), 0)
    return Parts(first, cache.as_strided((rows, rope), (rope, 1), rows * latent))


def paged(cache: Tensor, rope: int) -> tuple[Tensor, Tensor]:
    """(latents [pages, page_size, kv_lora], keys [pages, page_size, rope]), both dense; the spare
    page is the last.
    """
    held, page, width = parts(cache, rope), *cache.shape[1:]
    return held.latent.view(-1, page, width), held.rope.view(-1, page, rope)


def copy_blocks(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """`Layout.copy`: both parts of a block."""
    for part in paged(cache, _rope(cache)):
        part.index_copy_(0, targets, part.index_select(0, sources))


def export_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """`Layout.export`: latents of a block, then its keys."""
    held = [part.index_select(0, blocks).flatten(1) for part in paged(cache, _rope(cache))]
    return torch.cat(held, 1).view(torch.uint8)


def restore_blocks(cache: Tensor, blocks: Tensor, exported: Tensor) -> None:
    """`Layout.restore`."""
    rows = exported.contiguous().view(cache.dtype)
    width = cache.shape[1] * cache.shape[2]
    for part, held in zip(paged(cache, _rope(cache)), rows.tensor_split((width,), 1), strict=True):
        part.index_copy_(0, blocks, held.reshape(-1, *part.shape[1:]))


def places(cache: Tensor, slots: Tensor) -> Tensor:
    """Slots, and where they are negative the spare page's first row."""
    return torch.where(slots < 0, cache.shape[0] * cache.shape[1], slots)


def _rope(cache: Tensor) -> int:
    """Width of the keys that lie behind the latents."""
    values = cache.untyped_storage().nbytes() // cache.element_size()
    return values // ((cache.shape[0] + 1) * cache.shape[1]) - cache.shape[2]


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """CacheWrite for latent_split."""
    if not slots.shape[0]:
        return
    held = parts(cache, k_rope.shape[1])
    at = places(cache, slots).unsqueeze(1)
    for target, values in ((held.latent, latent), (held.rope, halves(k_rope))):
        npu().npu_scatter_nd_update_(target, at, values.to(target.dtype).contiguous())


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
    return held.latent[rows].to(dtype), pairs(held.rope[rows].to(dtype))


def cache_move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """CacheMove for latent_split."""
    old = places(cache, sources)
    new = torch.where(sources < 0, old, targets)
    for rows in parts(cache, _rope(cache)):
        rows[new] = rows[old]
