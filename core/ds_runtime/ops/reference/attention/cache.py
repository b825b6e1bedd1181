"""Torch references of the paged latent cache, and the layout `latent_pages`.

One layer is one tensor [pages, page_size, kv_lora + rope] in facts.kv_dtype. An entry has
the normed latent, then the rotated key. Slot s is row s % page_size of page s // page_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Segments
from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import is_fp8, torch_dtype


def allocate_latent_pages(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """One layer's cache, zeroed: [num_pages, page_size, kv_lora + qk_rope]."""
    width = facts.dims["kv_lora"] + facts.dims["qk_rope"]
    shape = (num_pages, facts.page_size, width)
    return torch.zeros(shape, dtype=torch_dtype(facts.kv_dtype), device=device)


def allocate_float_rows(blocks: int, facts: Facts, device: Any) -> Tensor:
    """One layer's rows of states, zeroed: [blocks, entries, row] float32."""
    shape = (blocks, facts.page_size, facts.dims["row"])
    return torch.zeros(shape, dtype=torch.float32, device=device)


def _indexable(values: Tensor) -> Tensor:
    """The same memory, as bytes where torch reads and writes no values of its dtype by index."""
    return values.view(torch.uint8) if is_fp8(values.dtype) else values


def copy_blocks(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """`Layout.copy` of layouts whose blocks lie along the first dim and nowhere else."""
    held = _indexable(cache)
    held.index_copy_(0, targets, held.index_select(0, sources))


def export_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """`Layout.export` of such layouts."""
    return _indexable(cache).index_select(0, blocks).view(torch.uint8).flatten(1)


def restore_blocks(cache: Tensor, blocks: Tensor, exported: Tensor) -> None:
    """`Layout.restore` of such layouts."""
    held = _indexable(cache)
    shape = (exported.shape[0], *cache.shape[1:])
    held.index_copy_(0, blocks, exported.contiguous().view(held.dtype).view(shape))


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """Reference of CacheWrite for latent_pages."""
    real = slots >= 0
    slots = slots[real]
    page, row = slots // cache.shape[1], slots % cache.shape[1]
    rows = torch.cat((latent[real], k_rope[real]), dim=-1)
    if is_fp8(cache.dtype):  # saturate: torch's cast makes NaN of what is too large
        largest = torch.finfo(cache.dtype).max
        rows = rows.clamp(-largest, largest)
    _indexable(cache)[page, row] = _indexable(rows.to(cache.dtype))


def gather_rows(cache: Tensor, pages: Tensor, start: int, length: int) -> Tensor:
    """Tokens [start, start + length) of the sequence with these `pages`: [length, width], new."""
    page_size = cache.shape[1]
    tokens = torch.arange(start, start + length, device=cache.device)
    owners = pages[tokens // page_size].to(torch.int64)
    return _indexable(cache)[owners, tokens % page_size].view(cache.dtype)


def cache_gather(
    cache: Tensor,
    page_table: Tensor,
    starts: Tensor,
    segs: Segments,
    kv_lora: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Reference of CacheGather for latent_pages."""
    rows = [torch.empty(0, cache.shape[2], dtype=dtype, device=cache.device)]
    for pages, start, length in zip(page_table, starts.tolist(), segs.lens, strict=True):
        rows.append(gather_rows(cache, pages, start, length).to(dtype))
    dense = torch.cat(rows)  # [sum, kv_lora + rope]
    return dense[:, :kv_lora], dense[:, kv_lora:]


def cache_move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Reference of CacheMove for latent_pages."""
    real = sources >= 0
    old, new = sources[real], targets[real]
    size = cache.shape[1]
    entries = cache.view(torch.uint8)  # bit for bit, whatever the dtype
    entries[new // size, new % size] = entries[old // size, old % size]
