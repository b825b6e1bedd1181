"""The lightning indexer: scores and choice in one op, over pages of keys in the compute dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_npu.library import npu


def index_select(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    owners: Tensor,
    lens: Tensor,
    k: int,
) -> Tensor:
    """IndexSelect with npu_lightning_indexer: every row is a sequence of one query, so that rows
    may see any number of tokens. Weights are rounded to the dtype of the queries.
    """
    rows, page = q.shape[0], cache.shape[1]
    if not rows:
        return torch.empty(0, k, dtype=torch.int32, device=q.device)
    table = page_table.index_select(0, owners)
    chosen = npu().npu_lightning_indexer(
        q.contiguous(),
        cache.unsqueeze(2),  # [pages, page, 1, d]
        weights.to(q.dtype).contiguous(),
        actual_seq_lengths_query=torch.arange(1, rows + 1, dtype=torch.int32, device=q.device),
        actual_seq_lengths_key=lens,
        block_table=table,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=k,
        sparse_mode=0,
    )[0]
    tokens = chosen[:, 0]  # [rows, k] of each sequence, -1 behind the last
    pages = table.gather(1, (tokens.clamp(min=0) // page).to(torch.int64))
    return torch.where(tokens < 0, tokens, pages * page + tokens % page)
