"""FlashInfer's CUTLASS kernel of MLA decode, on compute capability 10.

It computes 128 heads in the compute dtype, under the one scale that DeepSeek's widths have without
YaRN. Its plan keeps nothing of a step: a wrapper is planned once per number of rows, and each run
is given the page table and the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits
from ds_runtime_cuda.decode import LATENT, ROPE, Queries
from ds_runtime_cuda.flashinfer import _library, _workspace

_TABLE = 128  # tokens of which a page table has a multiple
_SCALE = (128 + ROPE) ** -0.5  # the only one


@dataclass
class PlannedCutlass:
    """Step state: queries, and a wrapper per number of rows."""

    queries: Queries
    wrappers: dict[int, Any] = field(default_factory=dict)


class MlaDecode:
    """Absorbed MLA decode through BatchMLAPagedAttentionWrapper's backend "cutlass"."""

    def __init__(self, facts: Facts) -> None:
        self._heads, self._page = facts.dims["heads"], facts.page_size
        self._dtype = getattr(torch, facts.dtype)

    def state(self, limits: Limits) -> PlannedCutlass:
        pages = limits.max_pages_per_sequence
        whole = pages + -pages % max(1, _TABLE // self._page)
        return PlannedCutlass(Queries.make(replace(limits, max_pages_per_sequence=whole)))

    def prepare(self, state: PlannedCutlass, batch: Batch) -> None:
        queries = state.queries
        queries.fill(batch)
        if (count := queries.count) and count not in state.wrappers:
            state.wrappers[count] = self._planned(queries, count)

    def _planned(self, queries: Queries, count: int) -> Any:
        wrapper = _library("flashinfer.mla").BatchMLAPagedAttentionWrapper(
            _workspace(queries.table.device), backend="cutlass"
        )
        wrapper.plan(
            metadata=_library("flashinfer.mla").MLAPlanMetadata.dense(
                torch.arange(count + 1, dtype=torch.int32),
                queries.table[:count],
                queries.lens[:count],
            ),
            num_heads=self._heads,
            head_dim_ckv=LATENT,
            head_dim_kpe=ROPE,
            page_size=self._page,
            causal=False,
            sm_scale=_SCALE,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            query_layout="packed",
            kv_cache_layout="packed",
        )
        return wrapper

    def run(self, state: PlannedCutlass, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        count, heads, _ = q.shape
        if not count:
            return q.new_empty(0, heads, LATENT)
        if abs(scale / _SCALE - 1) > 1e-6:
            q = q * (scale / _SCALE)
        out: Tensor = state.wrappers[count].run(
            query=q.contiguous(),
            kv_cache=cache,
            kv_len=state.queries.lens[:count],
            page_table=state.queries.table[:count],
        )
        return out
