"""Torch references of routing and routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.contract import Facts, Routing
from ds_runtime.ops.dtypes import torch_dtype, wide
from ds_runtime.ops.reference.activation import silu_mul
from ds_runtime.ops.reference.cases import OTHERS, Call, Case, Maker, SampleExperts, Saved, case
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
    """What Route gives, of the chosen: [tokens, top_k] → [tokens, top_k + shared]."""
    if not routing.shared:
        return weights, ids
    tokens, first = ids.shape[0], routing.num_experts
    slots = torch.arange(first, first + routing.shared, dtype=ids.dtype, device=ids.device)
    ones = weights.new_ones(tokens, routing.shared)
    return torch.cat((weights, ones), 1), torch.cat((ids, slots.expand(tokens, -1)), 1)


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Reference of Route."""
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
        packed.expect(self.tag)
        gate_up, down = packed.tensors["gate_up"], packed.tensors["down"]
        out = torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device)
        for e in torch.unique(ids).tolist():
            tokens, place = (ids == e).nonzero(as_tuple=True)
            y = F.linear(silu_mul(F.linear(x[tokens], gate_up[e])), down[e])
            out[tokens] += y.to(out.dtype) * weights[tokens, place, None].to(out.dtype)
        return out.to(x.dtype)


def _restore_gate_up(packed: Packed) -> Tensor:
    """[experts, 2 · intermediate, hidden]: gate rows, then up rows. Down stays in `tensors`."""
    values: Tensor = packed.tensors["gate_up"]
    return values.to(wide(values.dtype))


def router_logits_samples(facts: Facts) -> Iterator[Case]:
    """Low-precision activations against a float32 router."""
    for tokens, hidden, experts in ((0, 64, 8), (1, 33, 5), (17, 512, 64)):
        make = Maker(facts, label := f"{tokens}x{hidden}, {experts} experts")
        weight = make.normal(experts, hidden, dtype=torch.float32)
        yield case(label, facts, make.normal(tokens, hidden), weight)
    make = Maker(facts, "strided")
    weight = make.normal(6, 96, dtype=torch.float32)
    yield case("strided, large", facts, make.inside(make.normal(5, 96, scale=100)), weight)


_V2 = Routing(6, 40, 8, 3, "softmax", "group_limited_greedy", False, 16.0)
_V3 = Routing(8, 64, 8, 4, "sigmoid", "noaux_tc", True, 2.5)
_ROUTINGS: tuple[tuple[str, Routing], ...] = (
    ("greedy", Routing(top_k=6, num_experts=64)),
    ("greedy renormalised", Routing(2, 8, renormalize=True)),
    ("all experts", Routing(4, 4, scale=0.5)),
    ("groups by maximum", _V2),
    ("groups by two best", _V3),
    ("one group", Routing(8, 48, 1, 1, "sigmoid", "noaux_tc", True, 2.827)),
    ("groups of one", Routing(3, 8, 8, 4, "sigmoid", "noaux_tc", True, 1.0)),
    ("softmax with bias", replace(_V3, scoring="softmax", renormalize=False)),
    ("two shared slots", replace(_V2, shared=2)),
    ("one shared slot", replace(_V3, shared=1)),
)


def route_samples(facts: Facts) -> Iterator[Case]:
    """Every method; negative biases, saturated scores and ties."""
    f32 = torch.float32
    for label, routing in _ROUTINGS:
        experts = routing.num_experts
        for tokens in (0, 1, 33):
            make = Maker(facts, f"{label} {tokens}")
            bias = make.normal(experts, dtype=f32) if routing.method == "noaux_tc" else None
            logits = make.normal(tokens, experts, scale=2, dtype=f32)
            yield case(f"{label}, {tokens} tokens", facts, logits, bias, routing)
    make = Maker(facts, "extremes")
    logits = make.normal(9, 64, scale=2, dtype=f32)
    yield case("no bias", facts, logits, None, _V3)
    yield case("negative biases", facts, logits, -5 - make.normal(64, dtype=f32).abs(), _V3)
    yield case("saturated", facts, logits * 40, make.normal(64, dtype=f32), _V3)
    yield case("ties", facts, torch.zeros(3, 64), torch.zeros(64), _V3)
    yield case("ties of maxima", facts, torch.zeros(3, 40), None, _V2)


def _experts_case(
    make: Maker, label: str, sizes: tuple[int, int, int], fmt: str = "dense", cut: int = 0
) -> Case:
    experts, hidden, inter = sizes
    triples = [
        (
            make.weight(inter, hidden, fmt, offset=(cut, 0)),
            make.weight(inter, hidden, fmt, offset=(cut, 0)),
            make.weight(hidden, inter, fmt, offset=(0, cut)),
        )
        for _ in range(experts)
    ]
    packed_from = fmt.partition(" ")[0]
    facts = replace(make.facts, weight_format=packed_from, shape=(experts, inter, hidden))
    calls = [Call((SampleExperts(triples), facts), method="pack", save="packed")]
    top_k = min(3, experts)
    for tokens in (0, 1, 2, 19):
        # The last expert never gets a token.
        ids = [make.order(max(top_k, experts - 1))[:top_k] for _ in range(tokens)]
        chosen = torch.stack(ids).int() if ids else torch.empty(0, top_k, dtype=torch.int32)
        weights = make.uniform(tokens, top_k).to(torch.float32)
        weights[: tokens // 4, 0] = 0
        args = (make.normal(tokens, hidden), weights, chosen, Saved("packed"))
        calls.append(Call(args, method="apply"))
    empty = (torch.empty(0, top_k), torch.empty(0, top_k, dtype=torch.int32))
    foreign = (make.normal(0, hidden), *empty, Packed("nobody.nothing", (), {}, 0))
    calls.append(Call(foreign, method="apply", raises=TypeError))
    return Case(label, facts, tuple(calls))


def experts_samples(facts: Facts) -> Iterator[Case]:
    """Experts without tokens, zero weights, odd widths, FP8 with partial and cut blocks."""
    dense = (
        ("dense", (8, 64, 48)),
        ("dense odd", (5, 33, 17)),
        ("dense one expert", (1, 32, 64)),
        ("dense blocks", (5, 384, 256)),
    )
    for label, sizes in dense:
        yield _experts_case(Maker(facts, label), label, sizes)
    quantised = (
        ("fp8", (4, 128, 128), 0),
        ("fp8 partial", (3, 192, 176), 0),
        ("fp8 cut", (3, 128, 192), 64),
        ("fp8 blocks", (5, 256, 384), 0),
    )
    for label, sizes, cut in quantised:
        yield _experts_case(Maker(facts, label), label, sizes, "fp8_block", cut)
    for fmt in ("int8_channel", "int4_group", "int4_group zeros"):
        for sizes in ((4, 128, 96), (3, 77, 43)):
            label = f"{fmt} {sizes[1]}x{sizes[2]}"
            yield _experts_case(Maker(facts, label), label, sizes, fmt)
    for fmt in OTHERS:
        sizes = (3, 160, 72)
        yield _experts_case(Maker(facts, label := f"{fmt} 160x72"), label, sizes, fmt)
    for fmt in ("mxfp8", "nvfp4", "mxfp4"):  # matrix units of these want whole tiles
        label = f"{fmt} 256x256"
        yield _experts_case(Maker(facts, label), label, (3, 256, 256), fmt)
