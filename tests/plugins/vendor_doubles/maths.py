"""What several stand-ins compute: attention and scaled matmuls in float32."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def spread(values: Tensor, scale: Tensor, rows: int, cols: int) -> Tensor:
    """Values times scales of `rows` × `cols` each, in float32."""
    wide = scale.float().repeat_interleave(rows, -2)[..., : values.shape[-2], :]
    return values.float() * wide.repeat_interleave(cols, -1)[..., : values.shape[-1]]


def attend(q, keys, values, scale, seen):
    """q [h, d], keys [n, d], values [n, v]: the first `seen` keys; out [h, v] and natural lse."""
    scores = q.float() @ keys[:seen].float().T * scale
    return scores.softmax(-1) @ values[:seen].float(), scores.logsumexp(-1)


def varlen(q, k, v, cu_q, cu_k, scale, causal):
    """(out [Tq, h, dv], lse [Tq, h]); queries without keys give 0 and +inf, as the libraries do."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.full(q.shape[:2], float("inf"))
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        scores = torch.einsum("qhd,khd->qhk", q[q0:q1].float(), k[k0:k1].float()) * scale
        if causal:  # aligned at the ends
            first = torch.arange(q1 - q0) + (k1 - k0) - (q1 - q0)
            hidden = torch.arange(k1 - k0) > first.unsqueeze(1)
            scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
        sums = scores.logsumexp(-1)
        seen = torch.isfinite(sums)
        found = torch.einsum("qhk,khv->qhv", scores.softmax(-1), v[k0:k1].float())
        out[q0:q1] = torch.where(seen.unsqueeze(-1), found, 0.0)
        lse[q0:q1] = torch.where(seen, sums, float("inf"))
    return out.to(q.dtype), lse


def rows_of(cache, table, length):
    """The cached rows of one sequence: cache [pages, page, …]."""
    pages = -(-length // cache.shape[1])
    return cache[table[:pages].long()].flatten(0, 1)[:length]
