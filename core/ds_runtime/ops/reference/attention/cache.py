"""Torch references of the paged latent cache, and the layout `latent_pages`.

One layer is one tensor [pages, page_size, kv_lora + rope] in facts.kv_dtype: the normed latent,
then the rotated key. Slot s is row s % page_size of page s // page_size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Segments
from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import is_fp8, torch_dtype
from ds_runtime.ops.reference.cases import Case, Maker, case, segments


def allocate_latent_pages(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """One layer's cache, zeroed: [num_pages, page_size, kv_lora + qk_rope]."""
    width = facts.dims["kv_lora"] + facts.dims["qk_rope"]
    shape = (num_pages, facts.page_size, width)
    return torch.zeros(shape, dtype=torch_dtype(facts.kv_dtype), device=device)


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    """Reference of CacheWrite for latent_pages."""
    real = slots >= 0
    slots = slots[real]
    page, row = slots // cache.shape[1], slots % cache.shape[1]
    rows = torch.cat((latent[real], k_rope[real]), dim=-1)
    if is_fp8(cache.dtype):  # saturate: torch's cast makes NaN of what is too large
        largest = torch.finfo(cache.dtype).max
        bytes_ = cache.view(torch.uint8)
        bytes_[page, row] = rows.clamp(-largest, largest).to(cache.dtype).view(torch.uint8)
    else:
        cache[page, row] = rows.to(cache.dtype)


def gather_rows(cache: Tensor, pages: Tensor, start: int, length: int) -> Tensor:
    """Tokens [start, start + length) of the sequence with these `pages`: [length, width], new."""
    page_size = cache.shape[1]
    tokens = torch.arange(start, start + length, device=cache.device)
    owners = pages[tokens // page_size].to(torch.int64)
    if is_fp8(cache.dtype):  # torch has no gather of FP8
        return cache.view(torch.uint8)[owners, tokens % page_size].view(cache.dtype)
    return cache[owners, tokens % page_size]


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


def cache_write_samples(facts: Facts) -> Iterator[Case]:
    """Shuffled slots, padding, slices of wider rows; every other row must stay as it was."""
    latent, rope = facts.dims["kv_lora"], facts.dims["qk_rope"]
    for tokens, padding in ((0, 0), (1, 0), (7, 3), (2 * facts.page_size + 1, 2)):
        make = Maker(facts, label := f"{tokens} tokens, {padding} padding")
        cache, _ = make.paged((tokens + 5, 3))
        slots = make.order(cache.rows.shape[0])[:tokens]
        slots[:padding] = -1
        values = make.inside(make.normal(tokens, latent)), make.inside(make.normal(tokens, rope))
        yield case(label, facts, cache, *values, slots, written=(0,))
    make = Maker(facts, "only padding")
    cache, _ = make.paged((9,))
    values = make.normal(2, latent), make.normal(2, rope)
    yield case("only padding", facts, cache, *values, torch.tensor([-1, -7]), written=(0,))


def cache_gather_samples(facts: Facts) -> Iterator[Case]:
    """Ranges that start and end anywhere, empty ranges, no sequences."""
    page, latent = facts.page_size, facts.dims["kv_lora"]
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
        ("no sequences", (), (), ()),
        ("one token", (1,), (0,), (1,)),
        ("whole pages", (2 * page, page), (0, 0), (2 * page, page)),
        ("middles", (3 * page + 1, page + 3, 5), (page - 1, 1, 2), (page + 2, page + 2, 3)),
        ("empty ranges", (7, 2, 9), (7, 0, 4), (0, 2, 0)),
    )
    for label, lens, starts, counts in shapes:
        cache, table = Maker(facts, label).paged(lens)
        first = torch.tensor(starts, dtype=torch.int64)
        dtype = torch_dtype(facts.dtype)
        yield case(label, facts, cache, table, first, segments(*counts), latent, dtype)


def cache_move_samples(facts: Facts) -> Iterator[Case]:
    """Branches that move to the front, over slots that others leave; nothing to move."""
    cache, _ = (make := Maker(facts, "branches")).paged((9, 2 * facts.page_size + 6, 5))
    slots = make.order(cache.rows.shape[0])
    first, second = slots[:7], slots[7:14]
    sources = torch.stack((first[[2, 4, 6]], second[[1, 3, 3]]))
    targets = torch.stack((first[[1, 2, 3]], second[[1, 2, 4]]))
    sources[1, 0] = sources[1, 2] = -1
    yield case("branches", facts, cache, sources, targets, written=(0,))
    cache, _ = Maker(facts, "nothing").paged((3,))
    for shape in ((0, 3), (2, 0), (2, 2)):
        none = torch.full(shape, -1, dtype=torch.int64)
        yield case(f"nothing of {shape}", facts, cache, none, none, written=(0,))
