"""Torch reference of attention over expanded keys and values, and the layout `expanded_pages`.

One layer is one tensor [pages, page_size, heads · (nope + v) + rope] in facts.kv_dtype. An
entry has the key and the value of each head, then one rotated key for all. Slots are as in
`latent_pages`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Batch, Limits
from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import torch_dtype, wide
from ds_runtime.ops.reference.attention.cache import gather_rows
from ds_runtime.ops.reference.attention.dense import (
    DecodeState,
    ReferenceMlaDecode,
    seen_of,
)
from ds_runtime.ops.reference.layouts import expanded_width


def allocate_expanded_pages(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """One layer's cache, zeroed: [num_pages, page_size, heads · (nope + v) + rope]."""
    shape = (num_pages, facts.page_size, expanded_width(facts.dims))
    return torch.zeros(shape, dtype=torch_dtype(facts.kv_dtype), device=device)


class ReferenceMhaDecode:
    """Reference of MhaDecode for expanded_pages: one row after the other."""

    def __init__(self, facts: Facts) -> None:
        self._pages = ReferenceMlaDecode(facts)
        self.rope, self.v = facts.dims["qk_rope"], facts.dims["v"]

    def state(self, limits: Limits) -> DecodeState:
        return self._pages.state(limits)

    def prepare(self, state: DecodeState, batch: Batch) -> None:
        self._pages.prepare(state, batch)

    def run(
        self, state: DecodeState, q: Tensor, q_rope: Tensor, cache: Tensor, scale: float
    ) -> Tensor:
        heads, nope = q.shape[1:]
        out = q.new_empty(q.shape[0], heads, self.v)
        for i, (sequence, length) in enumerate(state.rows):
            rows = gather_rows(cache, state.page_table[sequence], 0, length).to(wide(q.dtype))
            both = rows[:, : -self.rope].view(length, heads, nope + self.v)
            k, v = both[..., :nope], both[..., nope:]
            scores = torch.einsum("hd,lhd->hl", q[i].to(rows.dtype), k)
            scores = (scores + q_rope[i].to(rows.dtype) @ rows[:, -self.rope :].T) * scale
            if state.tree is not None:
                scores = scores.masked_fill(~seen_of(state.tree[i], length), float("-inf"))
            out[i] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v).to(q.dtype)
        return out
