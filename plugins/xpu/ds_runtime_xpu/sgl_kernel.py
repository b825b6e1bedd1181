"""sgl-kernel-xpu: absorbed MLA over the paged latent cache, all of it or chosen slots.

Source of the calls: sgl_kernel/attention.py of sgl-project/sgl-kernel-xpu, snapshot 9cf16bf9. The
package has the import name of the one for NVIDIA GPUs; the two cannot be installed together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits

_LATENT = 512
_TILE = 128  # tokens: a row of the page table holds whole ones
_SPLITS = 1  # fixed, so that the workspace is and steps can be captured


@cache
def _library() -> Any:
    return import_module("sgl_kernel")


@dataclass
class Queries:
    """Step state. table [rows, pages] int32 and lens [rows] int32, of which `count` count: every
    query is a row, also where a sequence brings several. workspace: bytes.
    """

    table: Tensor
    lens: Tensor
    workspace: Tensor
    count: int = 0


class MlaDecode:
    """See the package's flash_mla_decode."""

    def __init__(self, facts: Facts) -> None:
        self._lib = _library()
        self._heads, self._page = facts.dims["heads"], facts.page_size

    def state(self, limits: Limits) -> Queries:
        rows = limits.max_sequences * limits.max_queries
        step = max(1, _TILE // self._page)
        pages = -(-limits.max_pages_per_sequence // step) * step
        size = self._lib.flash_mla_get_workspace_size(
            max(1, pages * self._page), max(1, rows), self._heads, self._page, _SPLITS
        )
        return Queries(
            torch.zeros(rows, pages, dtype=torch.int32, device=limits.device),
            torch.ones(rows, dtype=torch.int32, device=limits.device),
            torch.empty(size, dtype=torch.uint8, device=limits.device),
        )

    def prepare(self, state: Queries, batch: Batch) -> None:
        part, state.count = batch.decode, 0
        if part is None or not part.size:
            return
        table, lens = part.page_table, part.kv_lens
        if part.q_lens:
            counts = torch.tensor(part.q_lens)
            owner = torch.repeat_interleave(torch.arange(part.size), counts)
            behind = counts.cumsum(0)[owner] - 1 - torch.arange(part.rows)  # queries that follow
            there = owner.to(table.device, non_blocking=True)
            table = table[there]
            lens = lens[there] - behind.to(table.device, torch.int32, non_blocking=True)
        state.count = table.shape[0]
        state.table[: state.count, : table.shape[1]].copy_(table)
        state.lens[: state.count].copy_(lens)

    def run(self, state: Queries, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        count, heads, _ = q.shape
        if not count:
            return q.new_empty(0, heads, _LATENT)
        return self._lib.flash_mla_decode(  # type: ignore[no-any-return]
            q[..., :_LATENT].contiguous(),
            q[..., _LATENT:].contiguous(),
            cache,
            state.lens[:count],
            state.table[:count],
            state.workspace,
            scale,
            _SPLITS,
        )


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla with flash_mla_sparse_fwd, over the cache as one run of tokens."""
    if not q.shape[0]:
        return q.new_empty(0, q.shape[1], kv_lora)
    out: Tensor
    out, _, _ = _library().flash_mla_sparse_fwd(
        q.contiguous(),
        cache.flatten(0, 1).unsqueeze(1),  # [tokens, 1, 576]
        slots.unsqueeze(1),  # [rows, 1, n]
        scale,
        kv_lora,
    )
    return out.masked_fill((slots < 0).all(1)[:, None, None], 0.0)
