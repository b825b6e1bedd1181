"""Torch reference of attention over expanded keys and values, and the layout `expanded_pages`.

One layer is one tensor [pages, page_size, heads · (nope + v) + rope] in facts.kv_dtype: per head
its key and its value, then the rotated key that all heads share. Slots are as in `latent_pages`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Batch, Limits
from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import torch_dtype, wide
from ds_runtime.ops.reference import expanded_width
from ds_runtime.ops.reference.attention.cache import gather_rows
from ds_runtime.ops.reference.attention.dense import (
    DecodeState,
    ReferenceMlaDecode,
    decode_batch,
    seen_of,
    tree_bits,
)
from ds_runtime.ops.reference.cases import Call, Case, Maker, Saved


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


def mha_decode_samples(facts: Facts) -> Iterator[Case]:
    """One state over several steps: shuffled pages, NaN wherever nobody may look; trees."""
    page = facts.page_size
    steps: tuple[tuple[str, tuple[tuple[int, ...], ...], tuple[int, ...]], ...] = (
        ("one token", ((1,),), ()),
        ("page edges", ((page, page + 1, 2 * page, 1), (max(1, page - 1), 3 * page + 2)), ()),
        ("many, then few, then none", (tuple(range(1, 14)), (7,), ()), ()),
        ("long", ((300, 3),), ()),
        ("uneven rows", ((9, page, 2 * page + 1, 130),), (4, 1, 3, 5)),
    )
    for label, batches, q_lens in steps:
        yield _case(facts, label, batches, q_lens)
    for label, lens, trees in (
        ("short trees", (5, page + 3), ((0, 0, 1), (0, 1))),
        ("trees of several sizes", (70, 64, 2 * page + 9), ((0, 0, 1, 2, 2), (), (0,))),
    ):
        q_lens = tuple(len(parents) + 1 for parents in trees)
        bits = torch.cat([tree_bits(parents) for parents in trees])
        yield _case(replace(facts, phase="tree"), label, (lens,), q_lens, bits)


def _case(
    facts: Facts,
    label: str,
    batches: tuple[tuple[int, ...], ...],
    q_lens: tuple[int, ...],
    bits: Tensor | None = None,
) -> Case:
    """Steps for sequences of these lengths with so many rows each; bits: those of trees."""
    make, page, heads = Maker(facts, label), facts.page_size, facts.dims["heads"]
    nope, rope = facts.dims["qk_nope"], facts.dims["qk_rope"]
    pages = max(-(-n // page) for lens in batches for n in lens) + 1
    limits = Limits(
        64, 24, pages, page, heads, torch.device("cpu"), max_queries=max(q_lens, default=1)
    )
    calls = [Call((limits,), method="state", save="state")]
    for lens in batches:
        cache, table = make.paged(lens, width=expanded_width(facts.dims))
        step = decode_batch(lens, table, q_lens)
        if bits is not None and step.decode is not None:
            step.decode = replace(step.decode, tree=bits)
        calls.append(Call((Saved("state"), step), "prepare", save="none"))
        q = make.inside(make.normal(step.num_decode, heads, nope, scale=2), 0, rope)
        q_rope = make.inside(make.normal(step.num_decode, heads, rope, scale=2), 8, 0)
        scale = (nope + rope) ** -0.5
        calls.append(Call((Saved("state"), q, q_rope, cache, scale), method="run"))
    return Case(label, facts, tuple(calls))
