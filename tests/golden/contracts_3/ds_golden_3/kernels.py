"""mha_prefill by its first contract: heads of queries and keys with their rope parts in them."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Segments


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    out = q.new_zeros(tokens, heads, v.shape[2])
    lse = torch.full((tokens, heads), float("-inf"), device=q.device)
    q_end = k_end = 0
    for queries, keys in zip(q_segs.lens, k_segs.lens, strict=True):
        rows, cols = slice(q_end, q_end + queries), slice(k_end, k_end + keys)
        q_end, k_end = q_end + queries, k_end + keys
        if not queries or not keys:
            continue
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k[cols].float()) * scale
        if causal:
            seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(~seen.tril(keys - queries), float("-inf"))
        sums = torch.logsumexp(scores, -1, keepdim=True)
        weights = torch.exp(scores - sums).nan_to_num(0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v[cols].float()).to(q.dtype)
        lse[rows] = sums.squeeze(-1).T
    return out, lse
