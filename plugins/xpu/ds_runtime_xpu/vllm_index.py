"""vllm-xpu-kernels: V3.2's indexer over the paged FP8 index cache.

Source of the calls: torch.ops._C.indexer_k_quant_and_cache, which skips negative slots, and
torch.ops._xpu_C.fp8_paged_mqa_logits of release 0.1.16.2. Norm, rotation and Hadamard are torch's.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import rotated

_LEAST, _MAX = 1e-4, 448.0  # of a vector's largest magnitude, and of e4m3


@cache
def _library() -> Any:
    """Importing it registers torch.ops._C and torch.ops._xpu_C."""
    return import_module("vllm_xpu_kernels.fused_moe_interface")


@cache
def _hadamard(d: int, device: torch.device) -> Tensor:
    """Sylvester's matrix of size d times d^-½, float32."""
    made: Tensor = torch.ones(1, 1, device=device)
    while made.shape[0] < d:
        made = torch.cat((torch.cat((made, made), 1), torch.cat((made, -made), 1)))
    return torch.mul(made, d**-0.5)


def index_prologue(
    q: Tensor,
    k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """See IndexPrologue."""
    _library()
    (tokens, heads, d), f32 = q.shape, torch.float32
    queries = torch.empty(tokens, heads, d, dtype=torch.float8_e4m3fn, device=q.device)
    sizes = torch.empty(tokens * heads, 1, dtype=f32, device=q.device)
    if not tokens:
        return queries, sizes.view(tokens, heads)
    cos, sin = cos_sin[positions].to(f32).chunk(2, dim=-1)
    turn = _hadamard(d, q.device)
    normed = torch.nn.functional.layer_norm(k.to(f32), (d,), norm_weight, norm_bias, eps)
    keys = rotated(normed, cos, sin, interleaved) @ turn
    torch.ops._C.indexer_k_quant_and_cache(keys.to(q.dtype), cache, slots, d, "ue8m0")
    if heads:
        wide = rotated(q.to(f32), cos.unsqueeze(1), sin.unsqueeze(1), interleaved) @ turn
        rows = wide.view(tokens * heads, d)
        torch.ops._C.per_token_group_fp8_quant(
            rows, queries.view(-1, d), sizes, d, _LEAST, -_MAX, _MAX, True, False, False
        )
    return queries, sizes.view(tokens, heads)


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
