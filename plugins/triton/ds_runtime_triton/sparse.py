"""SparseMla over `latent_pages` and over `latent_fp8_groups`, for prefill and decode rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import e, log2

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import Facts
from ds_runtime_triton.config import Config, Sizes, folder, tuned
from ds_runtime_triton.jit.sparse import sparse_mla_kernel
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.machine import architecture, cores
from ds_runtime_triton.mla import combine
from ds_runtime_triton.scaled import Scaled
from ds_runtime_triton.workspace import SPLITS

_TOGETHER = 64  # rows of a launch, where each must have bits of its own


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
    strides = cache.stride()[:2]
    return _attend(q, (cache, cache, cache[..., kv_lora:]), strides * 3, cache, slots, kv_lora,
                   scale, "plain")  # fmt: skip


def scaled_sparse_mla(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
) -> Tensor:
    """SparseMla over latent_fp8_groups."""
    held = Scaled.of(cache, kv_lora)
    return _attend(q, held.parts, held.strides, cache, slots, kv_lora, scale, "grouped")


def sparse_mla_ordered(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
) -> Tensor:
    """As sparse_mla, each row in one order."""
    return _in_order(sparse_mla, q, cache, slots, kv_lora, scale)


def scaled_sparse_mla_ordered(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
) -> Tensor:
    """As scaled_sparse_mla, each row in one order."""
    return _in_order(scaled_sparse_mla, q, cache, slots, kv_lora, scale)


def _in_order(
    attend: Callable[..., Tensor],
    q: Tensor,
    cache: Tensor,
    slots: Tensor,
    kv_lora: int,
    scale: float,
) -> Tensor:
    """Rows in launches of _TOGETHER, the last one filled up: how slots are split, and by what
    configuration, follows from rows and heads."""
    rows = q.shape[0]
    filled = cdiv(rows, _TOGETHER) * _TOGETHER - rows
    if filled:
        q, slots = F.pad(q, (0, 0, 0, 0, 0, filled)), F.pad(slots, (0, 0, 0, filled), value=-1)
    starts = range(0, rows, _TOGETHER)
    parts = [slice(first, first + _TOGETHER) for first in starts]
    made = [attend(q[part], cache, slots[part], kv_lora, scale) for part in parts]
    return torch.cat(made)[:rows] if made else q.new_empty(0, q.shape[1], kv_lora)


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
    config = dict(_sizes(str(q.dtype).removeprefix("torch."), kind).at(rows * heads))
    blocks, (share, splits) = cdiv(heads, config["BLOCK_H"]), _splits(rows, heads, count, config)
    del config["WAVES"]
    size = rows * heads * splits if splits > 1 else 1
    partial = torch.empty(size, kv_lora, dtype=torch.float32, device=q.device)
    sums = torch.empty(size, dtype=torch.float32, device=q.device)
    low, high = pow2(kv_lora, 16), pow2(rope, 16)
    sparse_mla_kernel[(blocks, splits, rows)](
        q, *parts, slots, out, partial, sums, heads, kv_lora, rope, count, share,
        scale * log2(e), *q.stride(), slots.stride(0), *strides, splits, PAGE=cache.shape[1],
        SPLIT=splits > 1, LATENT=low, ROPE=high, GROUPED=kind == "grouped",
        EXACT=low == kv_lora and high == rope, **config,
    )  # fmt: skip
    if splits > 1:
        combine(partial, sums, None, out, splits, config["BLOCK_N"])
    return out
