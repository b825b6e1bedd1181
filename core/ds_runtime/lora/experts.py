"""Routed experts as one Linear each, for layers whose experts have adapters.

What an adapter adds lies between the products of an expert, where a kernel that runs all experts
at once lets nobody in. So they run one by one over the platform's own Linear, whatever the format.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_runtime.model.layers import LinearLayer
from ds_runtime.ops.table import Ops


class AdaptedExperts:
    """The routed experts of one layer, this rank's width of each."""

    def __init__(
        self, ops: Ops, gate_up: Sequence[LinearLayer], down: Sequence[LinearLayer]
    ) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down

    def __call__(
        self, x: Tensor, weights: Tensor, ids: Tensor, adapters: Tensor | None = None
    ) -> Tensor:
        """As layers.Experts."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in torch.unique(ids[ids >= 0]).tolist():
            tokens, place = (ids == e).nonzero(as_tuple=True)
            own = None if adapters is None else adapters[tokens]
            inner = self._ops.silu_mul(self._gate_up[e](x[tokens], own))
            y = self._down[e](inner, own)
            out.index_add_(0, tokens, y.to(torch.float32) * weights[tokens, place, None])
        return out.to(x.dtype)
