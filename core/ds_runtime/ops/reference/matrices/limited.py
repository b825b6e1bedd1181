"""Torch references of DeepSeek-V4's experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.contract import Routing
from ds_runtime.ops.dtypes import wide
from ds_runtime.ops.reference.matrices.moe import ReferenceExperts, scores_and_choice
from ds_runtime.ops.weight import Packed


def route_softplus(
    logits: Tensor, bias: Tensor | None, chosen: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """Reference of RouteSoftplus."""
    scores, choice = scores_and_choice(logits, bias, routing)
    ids = choice.topk(routing.top_k, dim=-1).indices if chosen is None else chosen
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, ids.to(torch.int32)


def silu_mul_limited(gate_up: Tensor, limit: float) -> Tensor:
    """Reference of SiluMulLimited."""
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    limited = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return limited.to(gate_up.dtype).contiguous()


class ReferenceLimitedExperts(ReferenceExperts):
    """Torch reference of the contract ExpertsLimited."""

    def apply(  # type: ignore[override]
        self, x: Tensor, weights: Tensor, ids: Tensor, limit: float, packed: Packed
    ) -> Tensor:
        return self.summed(x, weights, ids, packed, lambda both: silu_mul_limited(both, limit))
