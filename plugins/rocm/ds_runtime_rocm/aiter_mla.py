"""AITER: absorbed MLA decode and prefill, attention over chosen slots, and plain prefill.

Source of the calls: github.com/ROCm/aiter, aiter/mla.py and aiter/ops/mha.py. All read the cache
through lists of slots (pages of one token), so that any page size serves. Decode has a list per
query, so that chosen slots are just another list. Prefill has one per sequence, whose last queries
it masks, which is what verifying drafts needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits, Segments, mha_joined, rows_of

LATENT, ROPE = 512, 64  # what the library's kernels are made for
HEADS = (16, 32, 64, 128)  # numbers of heads that it has one for, in bfloat16
PREFILL_HEADS = (16, 128)


@cache
def _library(module: str = "aiter") -> Any:
    return import_module(module)


@dataclass
class State:
    """Lists of slots: those of list i are slots[starts[i]:starts[i + 1]]. All int32.

    queries [lists + 1]: which rows attend each list. ones [lists]: tokens in each list's last
    page. longest: most queries of a list.
    """

    slots: Tensor
    starts: Tensor
    queries: Tensor
    ones: Tensor
    count: int = 0
    total: int = 0
    longest: int = 1

    @staticmethod
    def make(limits: Limits, lists: int, page: int, longest: int = 1) -> State:
        device, most = limits.device, lists * limits.max_pages_per_sequence * page
        bounds = torch.arange(lists + 1, dtype=torch.int32, device=device)
        ones = torch.ones(lists, dtype=torch.int32, device=device)
        slots = torch.zeros(most, dtype=torch.int32, device=device)
        return State(slots, bounds.clone(), bounds, ones, longest=longest)

    def fill(self, table: Tensor, owners: Sequence[int], lens: Sequence[int], page: int) -> None:
        """List i: the first lens[i] slots of sequence owners[i]."""
        self.count, self.total = len(lens), sum(lens)
        device = self.slots.device
        host = torch.tensor((owners, lens), dtype=torch.int32)
        owner, length = host.to(device, non_blocking=True)
        ends = length.cumsum(0, dtype=torch.int32)
        self.starts[1 : self.count + 1].copy_(ends)
        row = torch.repeat_interleave(length, output_size=self.total)
        token = torch.arange(self.total, device=device, dtype=torch.int32) - (ends - length)[row]
        pages = table[owner[row], token // page]
        self.slots[: self.total].copy_(pages * page + token % page)


def _padded(q: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """[rows, heads, width] with heads of zeros up to the next of these numbers."""
    missing = next(n for n in sizes if n >= q.shape[1]) - q.shape[1]
    return torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q.contiguous()


def _attend(q: Tensor, cache: Tensor, state: State, slots: Tensor, scale: float) -> Tensor:
    """[rows, heads, 512] of q [rows, heads, 576] over the cached rows that `state` lists."""
    count, heads, width = q.shape
    q = _padded(q, HEADS)
    out = q.new_empty(count, q.shape[1], LATENT)
    _library("aiter.mla").mla_decode_fwd(
        q,
        cache.view(-1, 1, 1, width),  # [slots, page, kv heads, width]
        out,
        state.queries[: count + 1],
        state.starts[: count + 1],
        slots,
        state.ones[:count],
        1,  # queries per row
        sm_scale=scale,
    )
    return out[:, :heads]


class MlaDecode:
    """See the library's mla_decode_fwd, without its persistent mode."""

    def __init__(self, facts: Facts) -> None:
        self._page = facts.page_size
        self._captured = facts.graph_capture

    def state(self, limits: Limits) -> State:
        return State.make(limits, limits.max_sequences * limits.max_queries, self._page)

    def prepare(self, state: State, batch: Batch) -> None:
        part, state.count, state.total = batch.decode, 0, 0
        if part is not None and part.size:
            owners, lens = zip(*rows_of(part), strict=True)
            state.fill(part.page_table, owners, lens, self._page)

    def run(self, state: State, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        if not q.shape[0]:
            return q.new_empty(0, q.shape[1], LATENT)
        return _attend(q, cache, state, self._slots(state), scale)

    def _slots(self, state: State) -> Tensor:
        """How the library splits its work follows from the list's length: captured, from the
        longest."""
        return state.slots if self._captured else state.slots[: state.total]


class MlaVerify(MlaDecode):
    """See the library's mla_prefill_fwd: the queries of a sequence read its tokens once."""

    def state(self, limits: Limits) -> State:
        return State.make(limits, limits.max_sequences, self._page, limits.max_queries)

    def prepare(self, state: State, batch: Batch) -> None:
        part, state.count, state.total = batch.decode, 0, 0
        if part is None or not part.size:
            return
        state.fill(part.page_table, range(part.size), part.host_kv_lens, self._page)
        rows = torch.tensor((0, *(part.q_lens or (1,) * part.size)), dtype=torch.int32)
        ends = rows.cumsum(0, dtype=torch.int32)
        state.queries[: state.count + 1].copy_(ends, non_blocking=True)

    def run(self, state: State, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        rows, heads, width = q.shape
        if not rows:
            return q.new_empty(0, heads, LATENT)
        q, count = _padded(q, PREFILL_HEADS), state.count
        out = q.new_empty(rows, q.shape[1], LATENT)
        _library("aiter.mla").mla_prefill_fwd(
            q,
            cache.view(-1, 1, 1, width),
            out,
            state.queries[: count + 1],
            state.starts[: count + 1],
            self._slots(state),
            state.ones[:count],
            state.longest,
            sm_scale=scale,
        )
        return out[:, :heads]


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla with the library's decode: its lists are the slots that are not negative."""
    rows, n = slots.shape
    if not rows:
        return q.new_empty(0, q.shape[1], kv_lora)
    chosen = slots >= 0
    counts = chosen.sum(1, dtype=torch.int32)
    none = counts == 0
    listed = counts + none  # a list has one slot at least: of those without, the result is dropped
    starts = torch.zeros(rows + 1, dtype=torch.int32, device=q.device)
    starts[1:] = listed.cumsum(0)
    places = starts[:-1, None] + chosen.cumsum(1) - 1
    packed = slots.new_zeros(rows * n + 1)  # the last place takes what is no slot
    packed.scatter_(0, places.where(chosen, rows * n).long().view(-1), slots.reshape(-1))
    first = slots.amax()  # some slot whose values are real, if there is any
    packed.scatter_(0, starts[:-1].where(none, rows * n).long(), first.clamp(min=0).expand(rows))
    queries = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    state = State(packed, starts, queries, torch.ones_like(counts))
    out = _attend(q, cache, state, packed[: rows * n], scale)
    return out.masked_fill(none[:, None, None], 0.0)


def mha_prefill(
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """MhaPrefill with flash_attn_varlen_func, whose causal masks align at the ends, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _library().flash_attn_varlen_func(
            q,
            k,
            v,
            q_segs.cu,
            k_segs.cu,
            q_segs.longest,
            k_segs.longest,
            softmax_scale=scale,
            causal=causal,
            return_lse=True,
        )[:2]
        return out, lse.transpose(0, 1)  # [heads, tokens] → [tokens, heads]

    return mha_joined(attend, q, q_rope, k, k_rope, v)
