"""Torch reference of attention over chosen slots."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import is_fp8, wide

_ELEMENTS = 1 << 24  # rows are taken in groups so that what is gathered stays below this many


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """Reference of SparseMla for latent_pages."""
    rows = cache.flatten(0, 1)
    if not is_fp8(cache.dtype):
        return attend_slots(q, slots, kv_lora, scale, lambda chosen: rows[chosen])
    bytes_ = rows.view(torch.uint8)  # torch gathers no FP8
    return attend_slots(q, slots, kv_lora, scale, lambda chosen: bytes_[chosen].view(cache.dtype))


def attend_slots(
    q: Tensor, slots: Tensor, kv_lora: int, scale: float, read: Callable[[Tensor], Tensor]
) -> Tensor:
    """SparseMla over cached rows as `read(slots int64 [rows, n]) → [rows, n, width]` gives them."""
    out = q.new_empty(*q.shape[:2], kv_lora)
    step = max(1, _ELEMENTS // max(1, slots.shape[1] * q.shape[2]))
    for first in range(0, q.shape[0], step):
        some = slice(first, first + step)
        none = slots[some] < 0
        keys = read(slots[some].clamp(min=0).to(torch.int64)).to(wide(q.dtype))
        keys = keys.masked_fill(none.unsqueeze(-1), 0.0)  # slot 0 may hold NaN
        scores = q[some].to(keys.dtype) @ keys.transpose(1, 2) * scale  # [rows, heads, n]
        scores = scores.masked_fill(none.unsqueeze(1), float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)  # a row without slots has none
        out[some] = (weights @ keys[..., :kv_lora]).to(q.dtype)
    return out
