"""Torch references of routing and routed experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.contract import Facts, Routing
from ds_runtime.ops.dtypes import torch_dtype, wide
from ds_runtime.ops.reference.activation import silu_mul
from ds_runtime.ops.weight import ExpertSource, Packed


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Reference of RouterLogits."""
    compute = wide(x.dtype)
    return F.linear(x.to(compute), weight.to(compute))


def scores_and_choice(
    logits: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """(s, c) of the contract: what weighs and what chooses, both [tokens, experts]."""
    values = logits.to(wide(logits.dtype))
    if routing.scoring == "sqrtsoftplus":
        scores = F.softplus(values).sqrt()
    else:
        scores = values.softmax(-1) if routing.scoring == "softmax" else values.sigmoid()
    if routing.method == "noaux_tc" and bias is not None:
        return scores, scores + bias.to(scores.dtype)
    return scores, scores


def group_scores(choice: Tensor, routing: Routing) -> Tensor:
    """Score of each expert group: [tokens, n_group]."""
    per_group = choice.shape[-1] // routing.n_group
    grouped = choice.reshape(-1, routing.n_group, per_group)  # [tokens, n_group, per_group]
    best = 2 if routing.method == "noaux_tc" else 1
    return grouped.topk(min(best, per_group), dim=-1).values.sum(-1)


def mask_groups(choice: Tensor, routing: Routing) -> Tensor:
    """`choice` with the experts outside the best groups out of the race."""
    if routing.method == "greedy" or routing.topk_group >= routing.n_group:
        return choice
    kept = group_scores(choice, routing).topk(routing.topk_group, dim=-1).indices
    open_groups = torch.zeros(
        choice.shape[0], routing.n_group, dtype=torch.bool, device=choice.device
    ).scatter_(1, kept, True)
    experts_open = open_groups.repeat_interleave(choice.shape[-1] // routing.n_group, dim=1)
    # With a bias, choice scores can be negative: a closed group is −inf there, not 0.
    closed = float("-inf") if routing.method == "noaux_tc" else 0.0
    return choice.masked_fill(~experts_open, closed)


def with_shared_slots(weights: Tensor, ids: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Returns `weights` and `ids` of Route, [tokens, top_k], with the shared slots of `routing`
    after them: [tokens, top_k + shared].
    """
    if not routing.shared:
        return weights, ids
    tokens, first = ids.shape[0], routing.num_experts
    slots = torch.arange(first, first + routing.shared, dtype=ids.dtype, device=ids.device)
    ones = weights.new_ones(tokens, routing.shared)
    return torch.cat((weights, ones), 1), torch.cat((ids, slots.expand(tokens, -1)), 1)


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Reference of Route: see the contract for logits, bias, routing and what it returns."""
    scores, choice = scores_and_choice(logits, bias, routing)
    ids = mask_groups(choice, routing).topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return with_shared_slots(weights * routing.scale, ids.to(torch.int32), routing)


class ReferenceExperts:
    """Reference of Experts: expert by expert, over the tokens that chose it."""

    tag = "reference.experts"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        inter, hidden = source.intermediate, source.hidden
        gate_up = torch.empty(source.num_experts, 2 * inter, hidden, dtype=self.dtype)
        down = torch.empty(source.num_experts, hidden, inter, dtype=self.dtype)
        for e in range(source.num_experts):
            gate, up, low = source.expert(e)
            if e == 0:
                device = gate.parts[0].tensors["weight"].device
                gate_up, down = gate_up.to(device), down.to(device)
            gate_up[e, :inter] = gate.dequantise(self.dtype)
            gate_up[e, inter:] = up.dequantise(self.dtype)
            down[e] = low.dequantise(self.dtype)
        return Packed(
            tag=self.tag,
            shape=(source.num_experts, hidden, inter),
            tensors={"gate_up": gate_up, "down": down},
            nbytes=gate_up.nbytes + down.nbytes,
            restore=_restore_gate_up,
        )

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        return self.summed(x, weights, ids, packed, silu_mul)

    def summed(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        packed: Packed,
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Σ over the chosen experts, with this between their products."""
        packed.expect(self.tag)
        gate_up, down = packed.tensors["gate_up"], packed.tensors["down"]
        out = torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device)
        for e in torch.unique(ids[ids >= 0]).tolist():
            tokens, place = (ids == e).nonzero(as_tuple=True)
            y = F.linear(activation(F.linear(x[tokens], gate_up[e])), down[e])
            out[tokens] += y.to(out.dtype) * weights[tokens, place, None].to(out.dtype)
        return out.to(x.dtype)


def _restore_gate_up(packed: Packed) -> Tensor:
    """[experts, 2 · intermediate, hidden]: gate rows, then up rows. Down stays in `tensors`."""
    values: Tensor = packed.tensors["gate_up"]
    return values.to(wide(values.dtype))
