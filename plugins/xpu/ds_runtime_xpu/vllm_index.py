"""vllm-xpu-kernels: scores of V3.2's indexer over the paged FP8 index cache.

Source of the call: torch.ops._xpu_C.fp8_paged_mqa_logits of release 0.1.16.2. Every row is a
sequence of its own with one query.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


@cache
def _library() -> Any:
    """Importing it registers torch.ops._xpu_C."""
    return import_module("vllm_xpu_kernels.fused_moe_interface")


def index_scores(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, owners: Tensor, lens: Tensor
) -> Tensor:
    """See IndexScores."""
    _library()
    width = page_table.shape[1] * cache.shape[1]
    if not q.shape[0]:
        return q.new_empty(0, width, dtype=torch.float32)
    return torch.ops._xpu_C.fp8_paged_mqa_logits(  # type: ignore[no-any-return]
        q.contiguous().unsqueeze(1),  # [rows, 1, heads, d]
        cache.unsqueeze(2),  # [pages, page, 1, d + 4]
        weights.contiguous(),
        lens,
        page_table[owners.long()],
        None,
        width,
    )
