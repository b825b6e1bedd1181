"""AITER: absorbed MLA decode, attention over chosen slots, and prefill.

Source of the calls: github.com/ROCm/aiter, aiter/mla.py and aiter/ops/mha.py. Decode reads the
cache through lists of slots (pages of one token), so that any page size serves, and one row per
query, so that chosen slots are just another list.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits, Segments, rows_of

LATENT, ROPE = 512, 64  # what the library's kernels are made for
HEADS = (16, 32, 64, 128)  # numbers of heads that it has one for, in bfloat16


@cache
def _library(module: str = "aiter") -> Any:
    return import_module(module)


@dataclass
class State:
    """Lists of slots: those of row i are slots[starts[i]:starts[i + 1]]. All int32.

    queries [rows + 1]: one query per row. ones [rows]: tokens in each list's last page.
    """

    slots: Tensor
    starts: Tensor
    queries: Tensor
    ones: Tensor
    count: int = 0
    total: int = 0


def _attend(q: Tensor, cache: Tensor, state: State, slots: Tensor, scale: float) -> Tensor:
    """[rows, heads, 512] of q [rows, heads, 576] over the cached rows that `state` lists."""
    count, heads, width = q.shape
    padded = next(n for n in HEADS if n >= heads)
    if padded > heads:
        q = torch.cat((q, q.new_zeros(count, padded - heads, width)), 1)
    out = q.new_empty(count, padded, LATENT)
    _library("aiter.mla").mla_decode_fwd(
        q.contiguous(),
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
        rows = limits.max_sequences * limits.max_queries
        most = rows * limits.max_pages_per_sequence * self._page
        device = limits.device
        queries = torch.arange(rows + 1, dtype=torch.int32, device=device)
        ones = torch.ones(rows, dtype=torch.int32, device=device)
        slots = torch.zeros(most, dtype=torch.int32, device=device)
        return State(slots, queries.clone(), queries, ones)

    def prepare(self, state: State, batch: Batch) -> None:
        part, state.count, state.total = batch.decode, 0, 0
        if part is None or not part.size:
            return
        owners, lens = zip(*rows_of(part), strict=True)
        state.count, state.total = len(lens), sum(lens)
        device, page = state.slots.device, self._page
        host = torch.tensor((owners, lens), dtype=torch.int32)
        owner, length = host.to(device, non_blocking=True)
        ends = length.cumsum(0, dtype=torch.int32)
        state.starts[1 : state.count + 1].copy_(ends)
        row = torch.repeat_interleave(length, output_size=state.total)
        token = torch.arange(state.total, device=device, dtype=torch.int32) - (ends - length)[row]
        pages = part.page_table[owner[row], token // page]
        state.slots[: state.total].copy_(pages * page + token % page)

    def run(self, state: State, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        if not q.shape[0]:
            return q.new_empty(0, q.shape[1], LATENT)
        # How the library splits its work follows from the list's length: captured, from the longest
        slots = state.slots if self._captured else state.slots[: state.total]
        return _attend(q, cache, state, slots, scale)


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
    k: Tensor,
    v: Tensor,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """MhaPrefill with flash_attn_varlen_func, whose causal masks align at the ends, too."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    if not q_segs.total or not k_segs.total:
        return out, lse
    found, sums = _library().flash_attn_varlen_func(
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
    sums = sums.transpose(0, 1)  # [heads, tokens] → [tokens, heads]
    empty = ~torch.isfinite(sums)
    return found.masked_fill(empty.unsqueeze(-1), 0), sums.masked_fill(empty, float("-inf"))
