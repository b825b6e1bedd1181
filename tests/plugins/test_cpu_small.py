"""The native small ops, every variant of them, against torch in float64 and plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.ops.contract import Routing
from ds_runtime_cpu import kernels, native, prologue, routing, small
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import SMALL_DIMS, facts_for
from examples import examples

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
ISAS = pytest.mark.parametrize("isa", native.runnable())
DTYPES = st.sampled_from(sorted(TOLERANCE, key=str))
FP8 = torch.float8_e4m3fn


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= (tolerance or TOLERANCE[got.dtype]), float(error)


def inside(values: torch.Tensor, before: int = 3, after: int = 2) -> torch.Tensor:
    """The values as a slice of rows that are wider, with NaN beside them."""
    rows = F.pad(values, (before, after), value=float("nan"))
    return rows[..., before : before + values.shape[-1]]


def drawn(seed: int) -> None:
    torch.manual_seed(seed)


SEEDS = st.integers(0, 1 << 30)


@ISAS
@settings(max_examples=examples(60), deadline=None)
@given(rows=st.integers(0, 5), n=st.integers(1, 150), dtype=DTYPES, weight=DTYPES, seed=SEEDS)
def test_norms(isa, rows, n, dtype, weight, seed):
    drawn(seed)
    x, residual = (inside(torch.randn(rows, n).to(dtype)) for _ in range(2))
    w = (torch.rand(n) + 0.5).to(weight)
    with native.using(isa):
        normed = small.rms_norm(x, w, 1e-6)
        both, summed = small.add_rms_norm(x, residual.clone(), w, 1e-6)
        strided = small.add_rms_norm(x, residual, w, 1e-6) if rows > 1 else (both, summed)
    assert torch.equal(summed, x + residual)
    assert torch.equal(strided[0], both) and torch.equal(strided[1], summed)
    assert normed.is_contiguous() and both.is_contiguous() and summed.is_contiguous()
    if rows:
        close(normed, F.rms_norm(x.double(), (n,), w.double(), 1e-6))
        close(both, F.rms_norm(summed.double(), (n,), w.double(), 1e-6))


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Pairs of the last dimension as complex numbers, times e^(i angle): x [T, ..., d] float64."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    factor = torch.polar(torch.ones_like(angles), angles)
    while factor.ndim < pairs.ndim:
        factor = factor.unsqueeze(1)
    return torch.view_as_real(pairs * factor).flatten(-2)


@ISAS
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(0, 6),
    heads=st.integers(1, 5),
    pairs=st.integers(1, 70),
    lora=st.integers(1, 90),
    dtype=DTYPES,
    fp8=st.booleans(),
    seed=SEEDS,
)
def test_prologue(isa, rows, heads, pairs, lora, dtype, fp8, seed):
    drawn(seed)
    rope, nope = 2 * pairs, seed % 7
    angles = torch.rand(9, pairs, dtype=torch.float64) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).float()
    angles = torch.atan2(table[:, pairs:].double(), table[:, :pairs].double())
    q = inside(torch.randn(rows, heads, nope + rope).to(dtype))
    kv, weight = inside(torch.randn(rows, lora + rope).to(dtype)), torch.rand(lora).to(dtype)
    positions = torch.randint(9, (rows,))
    slots = torch.randperm(rows + 5)[:rows]
    slots[rows // 2 :: 3] = -1 - seed % 3
    cache = torch.randn(rows + 5, 1, lora + rope).to(FP8 if fp8 else dtype)
    before = cache.clone()
    with native.using(isa):
        q_rope, latent, k_rope = prologue.mla_prologue(
            q, kv, weight, 1e-6, positions, table, cache, slots
        )
        alone = prologue.rope(q[..., nope:], kv[:, lora:], positions, table)
    if rows:
        close(latent, F.rms_norm(kv[:, :lora].double(), (lora,), weight.double(), 1e-6))
        close(q_rope, turned(q[..., nope:], angles[positions]))
        close(k_rope, turned(kv[:, lora:], angles[positions]))
    assert torch.equal(q_rope, alone[0]) and torch.equal(k_rope, alone[1])
    stored = torch.cat((latent, k_rope), -1)
    if fp8:
        stored = stored.clamp(-448, 448).to(FP8)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            before.view(torch.uint8 if fp8 else dtype)[slot, 0] = stored[row].view(
                torch.uint8 if fp8 else dtype
            )
    same = torch.uint8
    assert torch.equal(cache.view(same), before.view(same))


def check_e4m3(values: torch.Tensor) -> None:
    """What cache_write stores, against torch's cast of values that saturate."""
    width = 60
    rows = F.pad(values, (0, -values.shape[0] % width)).reshape(-1, width)
    cache = torch.empty(rows.shape[0], 1, width, dtype=FP8)
    prologue.cache_write(cache, rows[:, :57], rows[:, 57:], torch.arange(rows.shape[0]))
    want = rows.float().clamp(-448, 448).to(FP8)
    nan = rows.isnan()
    got = cache[:, 0]
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])


@ISAS
def test_fp8_cache_rounds_every_bfloat16_as_torch_does(isa):
    with native.using(isa):
        check_e4m3(torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16))


@ISAS
def test_fp8_cache_rounds_float32_at_and_beside_every_tie(isa):
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).double()
    ties = (codes[1:] + codes[:-1]) / 2
    points = torch.cat((codes, ties)).float()
    up, down = (torch.nextafter(points, torch.tensor(x)) for x in (math.inf, -math.inf))
    special = torch.tensor([448, 449, 464, 465, 1e9, math.inf, math.nan, 1e-45, 2.0**-10, 0.0])
    values = torch.cat(
        (points, up, down, special, torch.randn(5000) * 2.0 ** torch.randint(-14, 12, (5000,)))
    )
    with native.using(isa):
        check_e4m3(torch.cat((values, -values)))


@ISAS
@settings(max_examples=examples(60), deadline=None)
@given(
    tokens=st.integers(0, 20),
    hidden=st.one_of(st.integers(1, 70), st.integers(500, 1100)),
    experts=st.integers(1, 21),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_router_logits(isa, tokens, hidden, experts, dtype, seed):
    drawn(seed)
    x, weight = inside(torch.randn(tokens, hidden).to(dtype)), torch.randn(experts, hidden)
    with native.using(isa):
        got = routing.router_logits(x, weight)
        alone = [routing.router_logits(x[t : t + 1], weight) for t in range(tokens)]
    want = x.double() @ weight.double().T
    assert got.dtype == torch.float32 and got.shape == want.shape
    if tokens:
        assert (got - want).norm() <= 1e-6 * (x.double().norm() * weight.double().norm() + 1e-30)
        assert torch.equal(got, torch.cat(alone))  # whatever else is in the batch


METHODS = st.sampled_from(
    [("greedy", False), ("group_limited_greedy", False), ("noaux_tc", True), ("noaux_tc", False)]
)


def choices(logits: list[float], bias: list[float], routing: Routing) -> tuple[list, list]:
    """(weighing scores, choosing scores with closed groups) of one token, in float64."""
    if routing.scoring == "sigmoid":
        s = [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in logits]
    else:
        top = max(logits)
        s = [math.exp(x - top) for x in logits]
        total = math.fsum(s)
        s = [x / total for x in s]
    c = [x + b for x, b in zip(s, bias, strict=True)]
    if routing.method == "greedy":
        return s, c
    size = len(c) // routing.n_group
    groups = [c[i : i + size] for i in range(0, len(c), size)]
    count = 2 if routing.method == "noaux_tc" else 1
    value = [sum(sorted(g, reverse=True)[:count]) for g in groups]
    opened = sorted(range(len(groups)), key=lambda g: value[g], reverse=True)
    closed = -math.inf if routing.method == "noaux_tc" else 0.0
    for g in opened[routing.topk_group :]:
        groups[g] = [closed] * size
    return s, [x for g in groups for x in g]


@ISAS
@settings(max_examples=examples(120), deadline=None)
@given(
    tokens=st.integers(0, 5),
    groups=st.integers(1, 6),
    size=st.integers(1, 40),
    method=METHODS,
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    renormalise=st.booleans(),
    ties=st.booleans(),
    data=st.data(),
    seed=SEEDS,
)
def test_route(isa, tokens, groups, size, method, scoring, renormalise, ties, data, seed):
    drawn(seed)
    experts = groups * size
    opened = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, min(8, opened * size)))
    choice = Routing(top_k, experts, groups, opened, scoring, method[0], renormalise, 1.7)
    logits = torch.randn(tokens, experts) * 3
    if ties:
        logits = logits.round()
    if method[0] == "greedy" or opened * size - 1 > top_k:
        logits[:, seed % experts] = float("-inf") if experts > top_k else 0.0
    bias = torch.randn(experts).mul(2).round() / 4 if method[1] else None
    with native.using(isa):
        weights, ids = routing.route(inside(logits), bias, choice)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert weights.shape == ids.shape == (tokens, top_k)
    extra = bias.tolist() if bias is not None else [0.0] * experts
    for t in range(tokens):
        s, c = choices(logits[t].tolist(), extra, choice)
        chosen = ids[t].tolist()
        assert len(set(chosen)) == top_k and all(0 <= e < experts for e in chosen)
        total = sum(s[e] for e in chosen) + 1e-20 if renormalise else 1.0
        for e, w in zip(chosen, weights[t].tolist(), strict=True):
            assert math.isclose(w, 1.7 * s[e] / total, rel_tol=2e-5, abs_tol=1e-30)
        best = sorted(c, reverse=True)[:top_k]
        if choice.method == "greedy" or groups == opened or not ties:  # else another group ties
            got = sorted((c[e] for e in chosen), reverse=True)
            for a, b in zip(got, best, strict=True):
                assert a == b or math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6)


@ISAS
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy", "noaux_tc"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("spoilt", [math.nan, -math.nan, math.inf, -math.inf])
def test_route_survives_what_is_no_number(isa, method, scoring, spoilt):
    """Ids stay distinct and in range; a NaN that is chosen shows in its weight."""
    choice = Routing(4, 24, 4, 2, scoring, method, True, 2.0)
    logits = torch.randn(3, 24)
    logits[1, ::2], logits[2] = spoilt, spoilt
    for bias in (None, torch.full((24,), spoilt)):
        with native.using(isa):
            weights, ids = routing.route(logits, bias, choice)
        for row in ids.tolist():
            assert len(set(row)) == 4 and all(0 <= e < 24 for e in row)
        if math.isnan(spoilt):
            assert weights[1:].isnan().any(-1).all()
        if bias is None:
            assert not weights[0].isnan().any()


@pytest.mark.parametrize("experts", [1024, 384, 257])
def test_route_among_many(experts):
    choice = Routing(8, experts)
    logits = torch.randn(7, experts)
    want = logits.double().softmax(-1).topk(8)
    weights, ids = routing.route(logits, None, choice)
    assert torch.equal(ids.sort(-1).values, want.indices.int().sort(-1).values)
    close(weights.sort(-1).values, want.values.sort(-1).values)
    with_shared, slots = routing.route(logits, None, replace(choice, shared=2))
    assert torch.equal(with_shared[:, :8], weights) and torch.equal(slots[:, :8], ids)
    assert slots[:, 8:].tolist() == [[experts, experts + 1]] * 7 and (with_shared[:, 8:] == 1).all()


def test_more_experts_than_the_buffers_hold_are_refused():
    facts = facts_for(CpuPlatform().info(), "float32", {**SMALL_DIMS, "experts": 1025})  # type: ignore[arg-type]
    (kernel,) = (k for k in kernels.ROUTING if k.op.name == "route")
    assert "1024" in (kernel.refuse(facts) or "")


@ISAS
@settings(max_examples=examples(40), deadline=None)
@given(
    tokens=st.integers(0, 9),
    held=st.integers(1, 12),
    hidden=st.integers(1, 70),
    start=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=SEEDS,
)
def test_embed(isa, tokens, held, hidden, start, dtype, seed):
    drawn(seed)
    table, ids = inside(torch.randn(held, hidden).to(dtype)), torch.randint(25, (2 * tokens,))[::2]
    with native.using(isa):
        got = small.embed(ids, table, start)
    assert got.shape == (tokens, hidden) and got.is_contiguous()
    for row, i in zip(got, ids.tolist(), strict=True):
        held_here = start <= i < start + held
        assert torch.equal(row, table[i - start] if held_here else torch.zeros_like(row))


@ISAS
@settings(max_examples=examples(60), deadline=None)
@given(
    tokens=st.integers(0, 5),
    groups=st.integers(1, 4),
    group=st.sampled_from([1, 8, 24, 64, 100, 128]),
    ue8m0=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_quantize_group(isa, tokens, groups, group, ue8m0, dtype, seed):
    drawn(seed)
    x = torch.randn(tokens, groups * group) * 2.0 ** torch.randint(-20, 20, (tokens, 1))
    x = inside(x.to(dtype))
    with native.using(isa):
        q, scale = small.quantize_group(x, group, ue8m0)
    grouped = x.float().unflatten(-1, (-1, group))
    want = grouped.abs().amax(-1).clamp(min=1e-4) / 448
    if ue8m0:
        want = torch.exp2(want.double().log2().ceil()).float()
    assert torch.equal(scale, want)
    codes = (grouped / want.unsqueeze(-1)).clamp(-448, 448).to(FP8).flatten(1)
    assert torch.equal(q.view(torch.uint8), codes.view(torch.uint8))


@ISAS
@pytest.mark.parametrize("ue8m0", [False, True])
def test_quantising_shows_a_nan(isa, ue8m0):
    x = torch.ones(2, 64)
    x[1, 40] = math.nan
    with native.using(isa):
        q, scale = small.quantize_group(x, 32, ue8m0)
    assert scale.isnan().tolist() == [[False, False], [False, True]]
    assert q[1].float().isnan().tolist() == [False] * 32 + [True] * 32


def over_threads(call) -> None:
    """The same bits on one and on two threads."""
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(call())
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@ISAS
def test_results_do_not_depend_on_threads(isa):
    """At sizes that are divided between threads."""
    x = torch.randn(700, 1100)
    weight, positions = torch.randn(300, 1100), torch.randint(50, (700,))
    table, slots = torch.randn(50, 64), torch.randperm(900)[:700]
    choice = Routing(8, 256, 8, 4, "sigmoid", "noaux_tc", True, 2.5)
    logits, bias = torch.randn(3000, 256), torch.randn(256)

    def fused() -> tuple[torch.Tensor, ...]:
        cache = torch.zeros(900, 1, 576, dtype=FP8)
        q, kv = x[:, :768].view(700, 4, 192), x[:, :576]
        out = prologue.mla_prologue(q, kv, x[0, :512].clone(), 1e-6, positions, table, cache, slots)
        return (*out, cache)

    with native.using(isa):
        for tokens in (1, 2, 700):
            over_threads(lambda: (routing.router_logits(x[:tokens], weight),))  # noqa: B023
        over_threads(lambda: routing.route(logits, bias, choice))
        over_threads(fused)
        over_threads(lambda: small.quantize_group(x[:, :1024], 128, False))
        over_threads(lambda: (small.embed(positions, x, 3), small.rms_norm(x, x[0], 1e-6)))
