"""The busiest rank, against drawn choices, against the router's own, and in what plan predicts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.ops.contract import Routing
from ds_runtime.ops.reference.matrices import moe
from ds_runtime.predict.busiest import busiest_rank, most_of
from ds_runtime.predict.calls import Step, calls
from ds_runtime_bench.shapes import config_of

V2_LITE = Routing(6, 64)
V2 = Routing(6, 160, 8, 3, "softmax", "group_limited_greedy", scale=16.0)
V3 = Routing(8, 256, 8, 4, "sigmoid", "noaux_tc", True, 2.5)


def most(ids, count, parts):
    """(experts with a token, choices) of the ranks that have the most of either."""
    met = np.bincount(np.asarray(ids).ravel(), minlength=count).reshape(parts, -1)
    return (met > 0).sum(1).max(), met.sum(1).max()


def drawn(routing, parts, tokens, runs, random):
    """(mean, standard error) of both, where every expert is as likely as another."""
    count, groups, found = routing.num_experts, routing.n_group, []
    for _ in range(runs):
        score = random.random((tokens, count))
        if routing.method != "greedy":
            order = random.random((tokens, groups)).argsort(1).argsort(1)
            score += np.repeat(order < routing.topk_group, count // groups, 1)
        found.append(most(score.argsort(1)[:, -routing.top_k :], count, parts))
    both = np.array(found)
    return both.mean(0), both.std(0) / runs**0.5


@st.composite
def routings(draw):
    """(a routing as `busiest_rank` is near to, parts that divide its experts)."""
    groups = draw(st.sampled_from([1, 3, 4, 8]))
    size = draw(st.sampled_from([4, 6, 8, 16, 32]))
    kept = draw(st.integers(min(3, groups), groups))
    top_k = draw(st.integers(1, min(8, kept * size // 4)))
    count = groups * size
    parts = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return Routing(top_k, count, groups, kept, method=method), parts


@given(routings(), st.integers(0, 100), st.integers(0, 1 << 30))
def test_the_busiest_rank_has_what_draws_say(both, tokens, seed):
    routing, parts = both
    found = busiest_rank(routing, parts, tokens)
    means, errors = drawn(routing, parts, tokens, 300, np.random.default_rng(seed))
    for got, mean, error in zip((found.experts, found.choices), means, errors, strict=True):
        assert abs(got - mean) <= 0.1 * mean + 5 * error


@pytest.mark.parametrize("routing", [V2_LITE, V2, V3], ids=["v2-lite", "v2", "v3"])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_routers_of_random_weights_are_as_uneven(routing, parts, tokens):
    """The reference of `route`, whose groups are not drawn but have the best experts."""
    random, runs = torch.Generator().manual_seed(tokens), 60
    logits = torch.randn(runs, tokens, routing.num_experts, generator=random)
    ids = [moe.route(one, None, routing)[1] for one in logits]
    both = np.array([most(one, routing.num_experts, parts) for one in ids])
    found, errors = busiest_rank(routing, parts, tokens), both.std(0) / runs**0.5
    for got, mean, error in zip((found.experts, found.choices), both.mean(0), errors, strict=True):
        assert abs(got - mean) <= 0.05 * mean + 4 * error


@given(routings(), st.integers(1, 4000))
def test_it_is_no_less_than_a_mean_rank_and_no_more_than_there_is(both, tokens):
    routing, parts = both
    found, each = busiest_rank(routing, parts, tokens), routing.num_experts // parts
    mean = tokens * routing.top_k / parts
    assert mean * (1 - 1e-9) <= found.choices <= tokens * min(routing.top_k, each)
    assert found.experts <= min(each, tokens * routing.top_k) * (1 + 1e-9)
    if parts == 1:
        assert found.choices == mean


@pytest.mark.parametrize(("count", "normal"), [(2, 0.56419), (3, 0.84628), (8, 1.42360)])
def test_the_maximum_of_many_is_that_of_normal_variables(count, normal):
    """Of a large mean; the values are those of H. L. Harter, Biometrika 48, 1961, table 1."""
    for share in (0.5, 1.0, 2.0):  # binomial, Poisson, negative binomial
        above = most_of(count, 1e6, share * 1e6) - 1e6
        assert above / (share * 1e6) ** 0.5 == pytest.approx(normal, rel=2e-3)


def test_the_maximum_of_few_is_that_of_the_named_distributions():
    """Binomial and Poisson, by their own formulas."""
    ways = np.array([1, 3, 3, 1]) / 8
    below = np.cumsum(ways)
    assert most_of(4, 1.5, 0.75) == pytest.approx((1 - below**4).sum(), rel=1e-9)
    rare = np.cumsum(np.exp(-0.7) * np.cumprod([1, *(0.7 / np.arange(1, 40))]))
    assert most_of(5, 0.7, 0.7) == pytest.approx((1 - rare**5).sum(), rel=1e-6)


@pytest.mark.parametrize("requests", [1, 8, 33])
def test_plan_prices_the_busiest_rank(tmp_path, requests):
    """Bytes of a call of experts, by those of a call that reaches all of the rank, and FLOPs."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("tiny-v3", "bfloat16")))
    given = {
        "model": str(tmp_path),
        "platform": "cpu",
        "load_format": "dummy",
        "threads": 1,
        "kv_memory": 8_000_000,
        "tp": 2,
        "dp": 2,
        "ep": 2,
        "enable_dp_attention": True,
    }
    assembly = assemble(EngineConfig(**given), set(given))
    model = assembly.model
    step = Step("decode", requests, requests, 64)
    call = next(c for c in calls(assembly, step) if c.op == "experts")
    work, found = call.work(call.rows), busiest_rank(model.routing, 2, call.rows)
    every, own = call.work(5000).weights, model.experts // 2
    assert call.rows == 2 * -(-requests // 2)
    assert work.weights / every == pytest.approx(found.experts / own)
    each = 6 * model.moe_intermediate * model.hidden  # FLOPs of a token in an expert
    assert work.flops == pytest.approx(each * found.choices)
