"""What several stand-ins compute: attention and scaled matmuls in float32."""

from __future__ import annotations

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
    pairs = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for q0, q1, k0, k1 in pairs:
        for i in range(q0, q1):
            seen = (k1 - k0) - (q1 - 1 - i) if causal else k1 - k0
            for h in range(q.shape[1] if seen > 0 else 0):
                got = attend(q[i, h : h + 1], k[k0:k1, h], v[k0:k1, h], scale, seen)
                out[i, h], lse[i, h] = got[0][0], got[1][0]
    return out.to(q.dtype), lse


def rows_of(cache, table, length):
    """The cached rows of one sequence: cache [pages, page, …]."""
    pages = -(-length // cache.shape[1])
    return cache[table[:pages].long()].flatten(0, 1)[:length]
