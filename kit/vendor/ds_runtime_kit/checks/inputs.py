"""Copies of sample inputs: for the kernel on its device, and for the oracle in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import (
    Batch,
    DecodePart,
    Limits,
    PrefillPart,
    PrefixChunk,
    Segments,
)
from ds_runtime.ops.contract import (
    FP4_KEYS,
    FP8_GROUPS,
    Facts,
    Kernel,
    Offers,
    load_attr,
    load_kernel,
)
from ds_runtime.ops.dtypes import fp8_vectors, is_fp8
from ds_runtime.ops.kernel import Layout
from ds_runtime.ops.reference.attention.index import (
    allocate_index_pages,
    fp8_parts,
    pack_fp4,
    read_fp4,
)
from ds_runtime.ops.reference.cases import PagedCache, SampleExperts
from ds_runtime.ops.weight import MlaWeights, Weight, WeightPart
from ds_runtime_kit.checks.numerics import copy_strided

_PLAIN = {  # layouts whose rows are as the samples have them
    "kv": frozenset({"latent_pages.v1", "expanded_pages.v1"}),
    "index": frozenset({"index_pages.v1"}),
}
_STRUCTURES = (
    *(Batch, DecodePart, PrefillPart, PrefixChunk, Segments),
    *(MlaWeights, Weight, WeightPart),
)

Encode = Callable[[PagedCache], Tensor]


def rebuild(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A copy of a sample input in which `convert` has replaced every leaf."""
    if isinstance(value, _STRUCTURES) and is_dataclass(value):
        made = {f.name: rebuild(getattr(value, f.name), convert) for f in fields(value)}
        return replace(value, **made)
    if isinstance(value, SampleExperts):
        return SampleExperts([rebuild(e, convert) for e in value.experts])
    if isinstance(value, tuple):
        return tuple(rebuild(v, convert) for v in value)
    if isinstance(value, dict):
        return {k: rebuild(v, convert) for k, v in value.items()}
    return convert(value)


def for_kernel(value: Any, device: torch.device, encode: Encode) -> Any:
    """The input on the device, strides kept, caches in the kernel's layout."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copy_strided(leaf, device, leaf.dtype)
        if isinstance(leaf, PagedCache):
            return encode(leaf)
        if isinstance(leaf, Limits):
            return replace(leaf, device=device)
        return leaf

    return rebuild(value, convert)


def for_oracle(value: Any, seen: Callable[[PagedCache], Tensor]) -> Any:
    """The input decoded to float64 on the host. `seen`: the rows that a cache really holds."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.dtype.is_floating_point and not is_fp8(leaf.dtype):
                return leaf.to(torch.float64)
            return leaf.clone()
        if isinstance(leaf, PagedCache):
            return plain_pages(replace(leaf, rows=seen(leaf).to(torch.float64)))
        if isinstance(leaf, Facts):
            return replace(leaf, dtype="float64", kv_dtype="float64", index_dtype="float64")
        if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
            return torch.float64
        return leaf

    return rebuild(value, convert)


def plain_pages(cache: PagedCache) -> Tensor:
    """The cache in the layout `latent_pages`, a copy: [pages, page_size, width]."""
    return cache.rows.clone().view(-1, cache.page_size, cache.rows.shape[1])


def index_pages(cache: PagedCache, facts: Facts) -> Tensor:
    """The cache in the layout `index_pages`, a copy on the host; NaN rows are bytes 0xFF."""
    if facts.index_dtype not in ("float8_e4m3fn", FP4_KEYS):
        return plain_pages(cache)
    pages = cache.rows.shape[0] // cache.page_size
    made = allocate_index_pages(pages, facts, "cpu")
    made.view(torch.uint8).fill_(255)
    held = (~cache.rows.isnan().any(-1)).nonzero().flatten()
    page, row = held // cache.page_size, held % cache.page_size
    if facts.index_dtype == FP4_KEYS:
        made[page, row] = pack_fp4(cache.rows[held])
        return made
    keys, scales = fp8_parts(made)
    rounded, scale = fp8_vectors(cache.rows[held])
    keys[page, row], scales[page, row] = rounded.view(torch.uint8), scale
    return made


@dataclass(frozen=True)
class CacheCodec:
    """Writes and reads caches in the layout of one kernel, through that layout's own kernels.

    Index keys cannot be read back through a contract: their kernels are run on index_pages.
    """

    facts: Facts
    device: torch.device
    layout: Layout | None = None  # None: latent_pages, or index_pages
    write: Kernel | None = None
    gather: Kernel | None = None
    role: str = "kv"

    @staticmethod
    def of(kernel: Kernel, facts: Facts, device: torch.device, offers: Offers) -> CacheCodec:
        """Raises LookupError if the kernel's layout cannot be written and read with `offers`."""
        role = kernel.op.layout or "kv"
        if not kernel.op.layout or _PLAIN[role] & kernel.layouts:
            return CacheCodec(facts, device, role=role)
        if role == "index":
            raise LookupError("only kernels of index_pages.v1 can be tried on an index cache")
        for layout in offers.layouts:
            if layout.tag in kernel.layouts:
                here = [k for k in offers.kernels if k.refuse(facts) is None]
                users = [k for k in here if layout.tag in k.layouts]
                writers = [k for k in users if k.op.name == "cache_write"]
                readers = [k for k in users if k.op.name == "cache_gather"]
                if writers and readers:
                    return CacheCodec(facts, device, layout, writers[0], readers[0])
        tags = ", ".join(sorted(kernel.layouts)) or "none"
        raise LookupError(f"no layout with cache_write and cache_gather is offered for {tags}")

    @property
    def rounds(self) -> bool:
        """Whether the layout keeps FP8 or FP4 with scales, which `decode` multiplies."""
        if self.role == "index":
            return self.facts.index_dtype in ("float8_e4m3fn", FP4_KEYS)
        return self.facts.kv_dtype == FP8_GROUPS

    def encode(self, cache: PagedCache) -> Tensor:
        """The cache on the device; what holds NaN rows is poisoned with bytes 0xFF."""
        if self.role == "index":
            return index_pages(cache, self.facts).to(self.device)
        if self.layout is None or self.write is None:
            return plain_pages(cache).to(self.device)
        pages = cache.rows.shape[0] // cache.page_size
        made: Tensor = load_attr(self.layout.allocate)(pages, self.facts, self.device)
        made.view(torch.uint8).fill_(255)
        held = (~cache.rows.isnan().any(-1)).nonzero().flatten()  # slots
        rows = cache.rows[held].to(getattr(torch, self.facts.dtype)).to(self.device)
        kv_lora = self.facts.dims["kv_lora"]
        function = load_kernel(self.write)
        function(made, rows[:, :kv_lora], rows[:, kv_lora:], held.to(self.device))
        return made

    def cut(self, cache: Tensor, page_size: int, pages: Tensor) -> Tensor:
        """A cache of these pages alone, in the same layout."""
        if self.layout is None or self.gather is None:
            return cache[pages.to(cache.device)]
        return self.encode(PagedCache(self.decode(cache, page_size, pages), page_size))

    def decode(self, cache: Tensor, page_size: int, pages: Tensor | None = None) -> Tensor:
        """All logical rows on the host, or those of some pages: [slots, width]."""
        if pages is not None and (self.layout is None or self.gather is None):
            cache = cache[pages.to(cache.device)]
        if self.role == "index" and cache.dtype == torch.uint8:
            keys, scales = fp8_parts(cache.detach().cpu().contiguous())
            values = keys.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
            return (values * scales.unsqueeze(-1)).flatten(0, 1)
        if self.role == "index" and cache.dtype == torch.int8:
            return read_fp4(cache.detach().cpu().flatten(0, 1))
        if self.layout is None or self.gather is None:
            return cache.detach().cpu().reshape(-1, cache.shape[-1])
        if pages is None:
            pages = torch.arange(cache.shape[0])
        table = pages.to(self.device, torch.int32).unsqueeze(0)
        total = table.shape[1] * page_size
        cu = torch.tensor([0, total], dtype=torch.int32, device=self.device)
        starts = torch.zeros(1, dtype=torch.int64, device=self.device)
        dtype = getattr(torch, self.facts.dtype)
        function = load_kernel(self.gather)
        segs = Segments((total,), cu)
        parts = function(cache, table, starts, segs, self.facts.dims["kv_lora"], dtype)
        return torch.cat(parts, dim=-1).cpu()

    def seen(self, cache: PagedCache) -> Tensor:
        """The logical rows as the layout keeps them (a lossy layout rounds), on the host."""
        if self.layout is None and not self.rounds:
            return cache.rows
        return self.decode(self.encode(cache), cache.page_size)
