"""Routing and experts references against transformers' DeepSeek V2 and V3 modules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE, DeepseekV3TopkRouter

from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, Routing
from ds_runtime.ops.contracts.moe import settled_tokens
from ds_runtime.ops.reference.cases import SampleExperts
from ds_runtime.ops.reference.matrices.moe import ReferenceExperts, route, router_logits
from ds_runtime.ops.weight import Weight, WeightPart
from examples import examples

HIDDEN = 32


def v3_config(routing: Routing, hidden: int = HIDDEN) -> DeepseekV3Config:
    return DeepseekV3Config(
        hidden_size=hidden,
        moe_intermediate_size=24,
        n_routed_experts=routing.num_experts,
        n_shared_experts=1,
        num_experts_per_tok=routing.top_k,
        n_group=routing.n_group,
        topk_group=routing.topk_group,
        norm_topk_prob=routing.renormalize,
        routed_scaling_factor=routing.scale,
    )


def same_choice(
    ours: tuple[torch.Tensor, torch.Tensor],
    theirs: tuple[torch.Tensor, torch.Tensor],
    settled: torch.Tensor,
) -> None:
    """Same experts with the same weights, whatever the order within a token."""
    dense = []
    for weights, ids in (ours, theirs):
        full = torch.zeros(ids.shape[0], 512).scatter_(1, ids.long(), weights.float())
        dense.append(full[settled])
    torch.testing.assert_close(dense[0], dense[1], rtol=2e-6, atol=1e-7)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.sampled_from([1, 2, 4, 8]),
    per_group=st.sampled_from([2, 4, 16]),
    kept=st.integers(1, 8),
    top_k=st.integers(1, 8),
    renormalize=st.booleans(),
    bias_shift=st.sampled_from([-3.0, 0.0, 1.0]),
)
def test_noaux_tc_equals_transformers(
    seed: int, groups: int, per_group: int, kept: int, top_k: int, renormalize: bool,
    bias_shift: float,
) -> None:  # fmt: skip
    kept = min(kept, groups)
    top_k = min(top_k, kept * per_group)
    routing = Routing(
        top_k, groups * per_group, groups, kept, "sigmoid", "noaux_tc", renormalize, 2.5
    )
    generator = torch.Generator().manual_seed(seed)
    router = DeepseekV3TopkRouter(v3_config(routing))
    router.weight.data = torch.randn(routing.num_experts, HIDDEN, generator=generator)
    router.e_score_correction_bias = (
        torch.randn(routing.num_experts, generator=generator) + bias_shift
    )
    x = torch.randn(16, HIDDEN, generator=generator)
    with torch.no_grad():
        logits, *theirs = router(x)
    bias = router.e_score_correction_bias
    settled = settled_tokens(logits.double(), bias.double(), routing)
    same_choice(route(logits, bias, routing), tuple(theirs), settled)
    torch.testing.assert_close(router_logits(x, router.weight.detach()), logits)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.sampled_from([1, 2, 8]),
    per_group=st.sampled_from([1, 5, 20]),
    kept=st.integers(1, 8),
    top_k=st.integers(1, 8),
    greedy=st.booleans(),
)
def test_softmax_routing_equals_transformers(
    seed: int, groups: int, per_group: int, kept: int, top_k: int, greedy: bool
) -> None:
    kept = min(kept, groups)
    top_k = min(top_k, per_group * (groups if greedy else kept))
    method = "greedy" if greedy else "group_limited_greedy"
    routing = Routing(top_k, groups * per_group, groups, kept, "softmax", method, False, 16.0)
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        n_routed_experts=routing.num_experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=kept,
        topk_method=method,
        routed_scaling_factor=16.0,
    )
    generator = torch.Generator().manual_seed(seed)
    router = DeepseekV2TopkRouter(config)
    router.weight.data = torch.randn(routing.num_experts, HIDDEN, generator=generator) * 0.3
    with torch.no_grad():
        logits, *theirs = router(torch.randn(16, HIDDEN, generator=generator))
    settled = settled_tokens(logits.double(), None, routing)
    same_choice(route(logits, None, routing), tuple(theirs), settled)


def test_most_random_tokens_are_settled() -> None:
    routing = Routing(8, 256, 8, 4, "sigmoid", "noaux_tc", True, 2.5)
    logits = torch.randn(2000, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert settled_tokens(logits, None, routing).double().mean() > 0.99


@pytest.mark.parametrize("tokens", [1, 13])
def test_experts_equal_the_moe_block_of_transformers(tokens: int) -> None:
    routing = Routing(4, 16, 4, 2, "sigmoid", "noaux_tc", True, 2.5)
    generator = torch.Generator().manual_seed(tokens)
    moe = DeepseekV3MoE(v3_config(routing)).double()
    for p in moe.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2
    x = torch.randn(1, tokens, HIDDEN, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        want = (moe(x) - moe.shared_experts(x))[0]
        _, weights, ids = moe.gate(x)

    def dense(values: torch.Tensor) -> Weight:
        values = values.detach()
        return Weight((WeightPart("w", "dense", tuple(values.shape), {"weight": values}),))

    source = SampleExperts(
        [
            (dense(both[:24]), dense(both[24:]), dense(down))
            for both, down in zip(moe.experts.gate_up_proj, moe.experts.down_proj, strict=True)
        ]
    )
    facts = Facts(DeviceInfo("cpu", "", ""), Dims({}), dtype="float64")
    experts = ReferenceExperts(facts)
    got = experts.apply(x[0], weights, ids.int(), experts.pack(source, facts))
    # transformers rounds the routing weights to float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shift", [-5.0, -1.5, 0.0])
def test_a_closed_group_is_never_chosen_however_low_the_bias(shift: float) -> None:
    """Choice scores below 0 in every open group: a closed group at 0 would win."""
    routing = Routing(4, 32, 8, 2, "sigmoid", "noaux_tc", True, 2.5)
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(64, 32, generator=generator)
    bias = torch.rand(32, generator=generator) * 0.2 + shift
    _, ids = route(logits, bias, routing)
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        choice = [1 / (1 + math.exp(-v)) + b for v, b in zip(row, bias.tolist(), strict=True)]
        groups = [sum(sorted(choice[4 * g : 4 * g + 4])[-2:]) for g in range(8)]
        kept = sorted(range(8), key=lambda g: groups[g])[-2:]
        inside = [e for g in kept for e in range(4 * g, 4 * g + 4)]
        best = sorted(inside, key=lambda e: choice[e])[-4:]
        assert sorted(chosen) == sorted(best)
