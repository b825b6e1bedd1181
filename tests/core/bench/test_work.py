"""Bytes and FLOPs of ops: against torch's own counter, tensor sizes, and known limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_runtime.assembly.site_list import with_target
from ds_runtime.description.hf import from_hf
from ds_runtime.description.sites import model_sites
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, Routing, load_attr
from ds_runtime.ops.contracts.work import Sizes, distinct_experts, matrix_bytes
from ds_runtime.ops.declare import OpWork
from ds_runtime.ops.dtypes import torch_dtype
from ds_runtime.ops.reference.cases import Maker, SampleExperts, segments
from ds_runtime.ops.reference.inputs import TrueInputs
from ds_runtime.ops.reference.layouts import INDEX_PAGES, LATENT_PAGES
from ds_runtime.ops.reference.matrices.rounding import quantise_part
from ds_runtime.ops.table import OPS
from ds_runtime_bench.ops import step_work
from ds_runtime_bench.shapes import config_of
from ds_runtime_kit.checks.conformance import facts_for

DEVICE = DeviceInfo("cpu", "", "")
CPU = torch.device("cpu")
FACTS = facts_for(DEVICE, "float32")
ROUTING = Routing(2, 8, method="noaux_tc")


def counted(call):
    with FlopCounterMode(display=False) as counter:
        result = call()
    return result, counter.get_total_flops()


def work(op, tokens, method="", context=0, shape=(), dtype="float32", kv_dtype="", **dims):
    """Of one call, with these dims."""
    facts = Facts(DEVICE, Dims(dims), dtype, kv_dtype or dtype, shape=shape)
    return OPS[op].cost.calls[method][1](Sizes(facts=facts, context=context), tokens)


def test_every_op_has_its_work():
    every = {**FACTS.dims, "hidden": 64, "q_lora": 32, "experts": 8, "top_k": 2}
    every |= {"streams": 4, "window": 3, "o_groups": 2}
    facts = Facts(DEVICE, Dims(every), "bfloat16", "bfloat16", shape=(8, 16))
    layouts = {"": LATENT_PAGES, "kv": LATENT_PAGES, "index": INDEX_PAGES}
    said = {"width": 128, "context": 9, "vocab": 50, "routing": ROUTING}
    for name, op in OPS.items():
        here = replace(facts, shape=(9, 8, 16) if "experts" in name else facts.shape)
        place = TrueInputs(facts=here, layout=layouts[op.layout], device=CPU, **said)
        for method, (_, of) in op.cost.calls.items():
            found = [of(place, tokens) for tokens in (1, 5)]
            assert 0 < found[0].nbytes < found[1].nbytes, (name, method)
            assert found[0].flops <= found[1].flops, (name, method)


def moved(results, facts, args):
    """Bytes of all tensors that a call gets, and of those that it gives."""
    given = sum(a.nbytes for a in args if isinstance(a, torch.Tensor))
    forms = results(facts, *args) if results is not None else ()
    return given, sum(torch.empty(shape, dtype=torch_dtype(name)).nbytes for shape, name in forms)


BY_ROW = sorted(
    name
    for name, op in OPS.items()
    if not (op.layout or op.owns_weights or op.cost.step)
    # A table of which few rows are read, scores that a row does not see, what is in the weights.
    and name not in ("embed", "index_topk", "compress_windows", "hc_post")
)


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("name", BY_ROW)
def test_ops_of_rows_move_what_they_get_and_give(name, tokens):
    """All their tensors once: these ops are bounded by that, in prompts above all."""
    every = {**FACTS.dims, "hidden": 256, "qk_nope": 128, "v": 128, "heads": 3}
    facts = Facts(DEVICE, Dims(every), "bfloat16", "bfloat16", shape=(40, 24))
    said = {"width": 384, "vocab": 50, "routing": ROUTING}
    place = TrueInputs(facts=facts, layout=LATENT_PAGES, device=CPU, **said)
    op = OPS[name]
    ((inputs, of),) = op.cost.calls.values()
    args = inputs(place, tokens)
    given, made = moved(op.results.get(""), facts, args)
    made += sum(args[op.place(written)].nbytes for written in op.writes)
    found = of(place, tokens)
    assert found.weights + found.reads == given
    assert found.writes == made


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("op", ["experts", "experts_limited"])
def test_tokens_choose_among_the_experts_of_all_ranks(op, ep, shared):
    """A rank has its share of them, and the others are −1; shared ones are in each row."""
    dims = {**FACTS.dims, "hidden": 16, "experts": 16, "top_k": 4}
    here = 16 // ep
    facts = replace(
        FACTS, dims=Dims(dims), shape=(here + shared, 8, 16), ranks={**FACTS.ranks, "ep": ep}
    )
    place = TrueInputs(
        facts=facts, layout=LATENT_PAGES, device=CPU, width=8, routing=Routing(4, 16)
    )
    inputs = OPS[op].cost.calls["apply"][0]
    x, weights, many = inputs(place, 2000)[:3]
    for ids in many:
        assert x.shape == (2000, 16) and ids.shape == weights.shape == (2000, 4 + shared)
        assert ids.dtype == torch.int32
        assert (ids[:, 4:] == here + torch.arange(shared)).all()
        routed = ids[:, :4]
        assert routed.min() >= -1 and routed.max() < here
        for row in routed:
            own = row[row >= 0]
            assert len(own.unique()) == len(own)
        share = (routed >= 0).float().mean().item()
        assert share == pytest.approx(1 / ep, abs=0.03)
        assert len(routed.unique()) == here + (ep > 1)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_linear(tokens):
    weight = Maker(FACTS, "w").weight(96, 64)
    x = torch.randn(tokens, 64)
    linear = load_attr(OPS["linear"].reference)(FACTS)
    packed = linear.pack(weight, FACTS)
    out, flops = counted(lambda: linear.apply(x, packed))
    got = work("linear", tokens, "apply", shape=(96, 64))
    assert got.flops == flops
    assert (got.reads, got.writes) == (x.nbytes, out.nbytes)
    assert got.weights == (96 * 64 * 4 if tokens else 0)


@pytest.mark.parametrize("fmt", ["fp8_block", "int8_channel", "int4_group"])
def test_the_bytes_of_a_format_are_those_of_its_tensors(fmt):
    rows, cols = 320, 300
    make = Maker(FACTS, fmt)
    if fmt == "fp8_block":
        part = make.weight(rows, cols, fmt).parts[0]
    else:
        part = quantise_part(make.weight(rows, cols).parts[0], fmt)
    sizes = {name: t.nbytes for name, t in part.tensors.items()}
    if fmt == "int4_group":
        sizes["weight"] //= 2  # two codes to a byte in memory, one in the checkpoint's tensor
    assert matrix_bytes(rows, cols, fmt, "bfloat16") == sum(sizes.values())


def test_experts():
    make = Maker(FACTS, "experts")
    trios = [(make.weight(24, 40), make.weight(24, 40), make.weight(40, 24)) for _ in range(8)]
    kernel = load_attr(OPS["experts"].reference)(FACTS)
    packed = kernel.pack(SampleExperts(trios), FACTS)
    ids = torch.tensor([[0, 3], [3, 5], [0, 7]], dtype=torch.int32)
    x, weights = torch.randn(3, 40), torch.rand(3, 2)
    out, flops = counted(lambda: kernel.apply(x, weights, ids, packed))
    got = work("experts", 3, "apply", shape=(8, 24, 40), experts=8, top_k=2)
    assert got.flops == flops
    trio = sum(t.parts[0].tensors["weight"].nbytes for t in trios[0])
    assert got.weights == pytest.approx(distinct_experts(8, 2, 3) * trio)
    shared = work("experts", 3, "apply", shape=(9, 24, 40), experts=8, top_k=2)
    assert shared.weights == got.weights + trio  # which every token takes
    assert got.reads == x.nbytes + weights.nbytes + ids.nbytes
    assert got.writes == out.nbytes


def test_absorb():
    dims = {"heads": 3, "qk_nope": 16, "v": 12, "kv_lora": 32, "qk_rope": 8}
    facts = Facts(DEVICE, Dims(dims))
    kernel = load_attr(OPS["mla_absorb"].reference)(facts)
    weight = Maker(FACTS, "kv_b").weight(3 * 28, 32)
    packed = kernel.pack(weight, facts)
    inputs = {
        "apply_q": (torch.randn(5, 3, 16), torch.randn(5, 3, 8)),
        "apply_v": (torch.randn(5, 3, 32),),
        "expand": (torch.randn(5, 32),),
    }
    halves = 0.0
    for method, x in inputs.items():
        out, flops = counted(lambda m=method, a=x: getattr(kernel, m)(*a, packed))
        got = work("mla_absorb", 5, method, **dims)
        assert got.flops == flops, method
        assert got.reads == sum(t.nbytes for t in x), method
        made = out if isinstance(out, tuple) else (out,)
        assert got.writes == sum(t.nbytes for t in made), method
        halves += got.weights if method != "expand" else 0
    assert halves == got.weights == 3 * 28 * 32 * 4


def test_prefill_attention_counts_what_is_seen():
    tokens = 50
    q, q_rope, k, v = (torch.randn(tokens, 3, d) for d in (16, 8, 16, 12))
    parts = (q, q_rope, k, torch.randn(tokens, 8), v)
    segs = segments(tokens)
    attend = load_attr(OPS["mha_prefill"].reference)
    (out, lse), flops = counted(lambda: attend(*parts, segs, segs, True, 0.2))
    got = work("mha_prefill", tokens, heads=3, qk_nope=16, qk_rope=8, v=12)
    assert got.flops == pytest.approx(flops * (tokens + 1) / (2 * tokens))  # it masks a square
    assert got.reads == sum(part.nbytes for part in parts)
    assert got.writes == out.nbytes + lse.nbytes


def test_decode_attention():
    dims = {"heads": 3, "kv_lora": 32, "qk_rope": 8}
    got = work("mla_decode", 3, "run", 13, dtype="bfloat16", kv_dtype="float8_e4m3fn", **dims)
    assert got.cached == 39 * 40
    assert got.reads == 3 * 3 * 40 * 2
    assert got.writes == 3 * 3 * 32 * 2
    assert got.flops == 2 * 39 * 3 * (40 + 32)


def test_decode_over_expanded_keys_and_values():
    """Of a token a key and a value per head, and the rotated key once."""
    dims = {"heads": 3, "qk_nope": 16, "qk_rope": 8, "v": 12}
    got = work("mha_decode", 2, "run", 17, dtype="bfloat16", **dims)
    assert got.cached == 34 * (3 * (16 + 12) + 8) * 2
    assert got.reads == 2 * 3 * (16 + 8) * 2
    assert got.writes == 2 * 3 * 12 * 2
    assert got.flops == 2 * 34 * 3 * (16 + 8 + 12)


def test_work_adds_up():
    a = OpWork(1, 2, 3, 4, 5)
    assert a + a == OpWork(2, 4, 6, 8, 10)
    assert a.nbytes == 11


def test_distinct_experts_against_draws():
    torch.manual_seed(0)
    draws = [
        len(torch.stack([torch.randperm(64)[:6] for _ in range(16)]).unique()) for _ in range(300)
    ]
    mean = sum(draws) / len(draws)
    assert distinct_experts(64, 6, 16) == pytest.approx(mean, abs=0.5)
    assert distinct_experts(64, 6, 1) == pytest.approx(6)


def step(shape, stored, quantize, batch):
    config = from_hf(config_of(shape, "bfloat16"))
    facts = Facts(DEVICE, config.dims(), dtype="bfloat16", kv_dtype="bfloat16")
    form = with_target(quantize, lambda m: "dense" if m == "lm_head" else stored)
    return step_work.decode_step(model_sites(config, form), facts, batch)


@pytest.mark.parametrize(
    ("shape", "stored", "quantize", "limits"),
    [
        ("lite-8", "dense", "none", {1: 44, 4: 87, 16: 172}),
        ("lite-8", "fp8_block", "none", {1: 70}),
        ("lite-8", "dense", "int8", {1: 86}),
        ("lite-8", "dense", "int4", {1: 130}),
        ("v3-cpu", "dense", "none", {1: 19.4, 4: 59, 16: 229}),
    ],
)
def test_decode_steps_at_77_gigabytes_per_second(shape, stored, quantize, limits):
    """Tokens per second, where reading the weights of a step is all that takes time."""
    for batch, limit in limits.items():
        total = sum(w.nbytes for w in step(shape, stored, quantize, batch).values())
        assert batch * 77e9 / total == pytest.approx(limit, rel=0.01)


def test_a_step_reads_every_weight_of_the_checkpoint_once():
    """With so many tokens that every expert has some: all parameters but the embedding."""
    from ds_runtime_bench.checkpoints.checkpoint import plan_tensors

    raw = config_of("lite-8", "bfloat16")
    linears = sum(p.nbytes for p in plan_tensors(raw) if len(p.shape) == 2 and p.kind == "weight")
    found = step("lite-8", "dense", "none", 100_000)
    routers = found.pop("router_logits").weights / 2  # held in float32
    assert sum(w.weights for w in found.values()) + routers == pytest.approx(linears, rel=1e-9)


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 7, 500])
def test_parts_of_the_experts_read_and_compute_what_shares_of_all_do(tokens, shared):
    """On average: an eighth of the experts, each eight times as wide. Slots of shared experts are
    in every part, and a token's in one of them."""
    dims = Dims({"experts": 64, "top_k": 6})
    of = OPS["experts"].cost.calls["apply"][1]

    def found(ep):
        facts = Facts(DEVICE, dims, "bfloat16", "bfloat16", ranks=Dims({"tp": 8, "ep": ep}))
        shape = (64 // ep + shared, 16 * ep, 32)
        return of(Sizes(facts=replace(facts, shape=shape)), tokens)

    whole = found(1)
    for ep in (2, 4, 8):
        part, more = found(ep), (ep - 1) * shared * 3 * 16 * 32 * 2
        assert part.weights == pytest.approx(whole.weights + (more if tokens else 0))
        assert part.flops == pytest.approx(whole.flops)


def test_the_cache_counts_with_the_context():
    config = from_hf(config_of("lite-8", "bfloat16"))
    facts = Facts(DEVICE, config.dims(), dtype="bfloat16", kv_dtype="float8_e4m3fn")
    sites = model_sites(config, lambda m: "dense")
    got = step_work.decode_step(sites, facts, 3, 1000)["mla_decode"]
    assert got.cached == 3 * 1000 * 576 * 8
