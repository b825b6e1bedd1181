"""SparseMla over `latent_pages` and over `latent_fp8_groups`, for prefill and decode rows."""

from __future__ import annotations

from collections.abc import Hashable
from math import e, log2
from typing import NamedTuple

import torch
from torch import Tensor

from ds_runtime.api import Facts
from ds_runtime_triton.config import Config, Sizes, folder, tuned
from ds_runtime_triton.jit.sparse import sparse_mla_kernel
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.machine import architecture, cores
from ds_runtime_triton.mla import combine
from ds_runtime_triton.scaled import Scaled
from ds_runtime_triton.workspace import SPLITS, TOGETHER


def variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of either: `_sizes` and `_splits` of the kind that has more."""
    size = rows * facts.dims["heads"]
    found = [_sizes(facts.dtype, kind) for kind in ("plain", "grouped")]
    # of one, of two or more pieces: between these only numbers change
    held = [min(_splits(rows, facts.dims["heads"], facts.dims["index_topk"], s.at(size))[1], 2)
            for s in found]  # fmt: skip
    return *(sizes.number(size) for sizes in found), *held


def _sizes(dtype: str, kind: str) -> Sizes:
    return tuned(folder(architecture(), dtype), "sparse_mla", kind)


def _splits(rows: int, heads: int, count: int, config: Config) -> tuple[int, int]:
    """(slots of a piece of a row, pieces)."""
    step = config["BLOCK_N"]
    free = cores() * config["WAVES"] // (rows * cdiv(heads, config["BLOCK_H"]))
    share = cdiv(cdiv(count, max(1, min(free, SPLITS))), step) * step
    return share, cdiv(count, share)


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla over latent_pages."""
    return _whole(_plain(cache, kv_lora), q, slots, kv_lora, scale)


def scaled_sparse_mla(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
) -> Tensor:
    """SparseMla over latent_fp8_groups."""
    return _whole(_grouped(cache, kv_lora), q, slots, kv_lora, scale)


def sparse_mla_ordered(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
) -> Tensor:
    """As sparse_mla, each row in one order."""
    return _in_order(_plain(cache, kv_lora), q, slots, kv_lora, scale)


def scaled_sparse_mla_ordered(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
) -> Tensor:
    """As scaled_sparse_mla, each row in one order."""
    return _in_order(_grouped(cache, kv_lora), q, slots, kv_lora, scale)


class _Held(NamedTuple):
    """A cache as the kernel reads it: where latents, scales and rotated keys of slot 0 begin, page
    and row strides of each, and slots of a page."""

    kind: str
    parts: tuple[Tensor, Tensor, Tensor]
    strides: tuple[int, ...]
    page: int


def _plain(cache: Tensor, kv_lora: int) -> _Held:
    parts, strides = (cache, cache, cache[..., kv_lora:]), cache.stride()[:2] * 3
    return _Held("plain", parts, strides, cache.shape[1])


def _grouped(cache: Tensor, kv_lora: int) -> _Held:
    held = Scaled.of(cache, kv_lora)
    return _Held("grouped", held.parts, held.strides, cache.shape[1])


def _whole(held: _Held, q: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    out = torch.empty(*q.shape[:2], kv_lora, dtype=q.dtype, device=q.device)
    if len(q):
        _attend(held, q, slots, out, scale, len(q))
    return out


def _in_order(held: _Held, q: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """Up to TOGETHER rows at a time, so that what splits hand over has a bound. How slots are
    split, and by what configuration, is that of so many rows, however few there are."""
    out = torch.empty(*q.shape[:2], kv_lora, dtype=q.dtype, device=q.device)
    for first in range(0, len(q), TOGETHER):
        some = slice(first, first + TOGETHER)
        _attend(held, q[some], slots[some], out[some], scale, TOGETHER)
    return out


def _attend(held: _Held, q: Tensor, slots: Tensor, out: Tensor, scale: float, as_many: int) -> None:
    """Fills out [rows, heads, latent]. One launch where rows fill the device, else two: every row's
    slots are then split. as_many: rows by which that and the configuration are chosen."""
    (rows, heads, width), count, latent = q.shape, slots.shape[1], out.shape[2]
    rope = width - latent
    sizes = _sizes(str(q.dtype).removeprefix("torch."), held.kind)
    config = dict(sizes.at(as_many * heads))
    blocks, (share, splits) = cdiv(heads, config["BLOCK_H"]), _splits(as_many, heads, count, config)
    del config["WAVES"]
    size = rows * heads * splits if splits > 1 else 1
    partial = torch.empty(size, latent, dtype=torch.float32, device=q.device)
    sums = torch.empty(size, dtype=torch.float32, device=q.device)
    low, high = pow2(latent, 16), pow2(rope, 16)
    sparse_mla_kernel[(blocks, splits, rows)](
        q, *held.parts, slots, out, partial, sums, heads, latent, rope, count, share,
        scale * log2(e), *q.stride(), slots.stride(0), *held.strides, splits, PAGE=held.page,
        SPLIT=splits > 1, LATENT=low, ROPE=high, GROUPED=held.kind == "grouped",
        EXACT=low == latent and high == rope, **config,
    )  # fmt: skip
    if splits > 1:
        combine(partial, sums, None, out, splits, config["BLOCK_N"])
