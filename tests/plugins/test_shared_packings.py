"""What one plugin packed, another computes with: the packings FP8_ROWS, FP8_EXPERTS and
DENSE_EXPERTS."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreter import DEVICE, needs_triton
from vendor_doubles import cuda, install
from vendor_doubles.compiled import standing_in

from ds_runtime.api import DENSE_EXPERTS, FP8_EXPERTS, FP8_ROWS
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import packed_bytes
from ds_runtime.config import EngineConfig
from ds_runtime.ops.reference.cases import Maker, SampleExperts
from ds_runtime.ops.reference.matrices.moe import ReferenceExperts
from ds_runtime_cuda import experts_streaming as own
from ds_runtime_cuda import grouped_fp8
from ds_runtime_kit.checks.conformance import facts_for
from ds_runtime_kit.checks.numerics import relative_error

pytestmark = needs_triton
FIXTURES = Path(__file__).parents[1] / "core" / "model" / "fixtures"
FACTS = facts_for(DEVICE, "bfloat16")


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    install(monkeypatch, cuda.MODULES, cuda.ADAPTERS)
    with standing_in(monkeypatch):
        yield


def test_rows():
    from ds_runtime_cuda import deep_gemm
    from ds_runtime_triton.linear import LinearFp8

    make = Maker(FACTS, "rows")
    weight, x = make.weight(200, 384, "fp8_block"), make.normal(5, 384)
    packed = LinearFp8(FACTS).pack(weight, FACTS)
    other = deep_gemm.LinearFp8(FACTS)
    assert packed.tag == other.pack(weight, FACTS).tag == FP8_ROWS
    got = other.apply(x, packed)
    assert torch.equal(got, other.apply(x, other.pack(weight, FACTS)))
    assert relative_error(got, x.double() @ weight.dequantise(torch.float64).T) < 4e-2
    cut = make.weight(200, 384, "fp8_block", (96, 104))
    assert LinearFp8(FACTS).pack(cut, FACTS).tag != FP8_ROWS


def test_kv_b():
    """Triton packs and decodes; DeepGEMM expands many tokens, and does all of it from its own."""
    from ds_runtime_cuda import deep_gemm
    from ds_runtime_triton.absorb import MlaAbsorb

    dims = {**FACTS.dims, "heads": 3, "qk_nope": 128, "v": 128, "kv_lora": 256}
    facts = replace(FACTS, dims=dims, weight_format="fp8_block", shape=(768, 256))
    make = Maker(facts, "kv_b")
    weight = make.weight(768, 256, "fp8_block")
    portable, other = MlaAbsorb(facts), deep_gemm.MlaAbsorb(facts)
    packed, own_packed = portable.pack(weight, facts), other.pack(weight, facts)
    assert packed.tag == own_packed.tag == FP8_ROWS
    latent = make.normal(130, 256)
    want = (latent.double() @ weight.dequantise(torch.float64).T).view(130, 3, 256)
    for each in (packed, own_packed):
        for part, right in zip(other.expand(latent, each), want.split(128, 2), strict=True):
            assert part.shape == right.shape and relative_error(part, right) < 4e-2
    wide = weight.dequantise(torch.float64).view(3, 256, 256)
    q, q_rope, x = make.normal(2, 3, 128), make.normal(2, 3, 64), make.normal(2, 3, 256)
    absorbed = other.apply_q(q, q_rope, own_packed)
    assert torch.equal(absorbed[..., 256:], q_rope)
    right = torch.einsum("thn,hnl->thl", q.double(), wide[:, :128])
    assert relative_error(absorbed[..., :256], right) < 1e-2
    right = torch.einsum("thl,hvl->thv", x.double(), wide[:, 128:])
    assert relative_error(other.apply_v(x, own_packed), right) < 1e-2
    cut = make.weight(768, 256, "fp8_block", (96, 672))
    assert portable.pack(cut, facts).tag != FP8_ROWS


@pytest.mark.parametrize("rows", [64, 65, 100, 128, 129])
def test_rows_that_are_filled_up_give_what_each_gives_alone(rows):
    """DeepGEMM takes 65 to 128 rows of a long and narrow weight as 129."""
    from ds_runtime_cuda import deep_gemm

    make = Maker(FACTS, "filled")
    weight, x = make.weight(16384, 256, "fp8_block"), make.normal(rows, 256)
    kernel = deep_gemm.LinearFp8(FACTS)
    packed = kernel.pack(weight, FACTS)
    assert (kernel.quantizes(rows, packed) is None) == (64 < rows <= 128)
    got = kernel.apply(x, packed)
    assert got.shape == (rows, 16384) and got.is_contiguous()
    for row in (0, rows - 1):
        alone = kernel.apply(x[row : row + 1], packed)[0]
        assert relative_error(got[row], alone.double()) < 5e-3


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_experts(scale):
    from ds_runtime_cuda import deep_gemm
    from ds_runtime_triton.experts import ExpertsFp8

    make = Maker(FACTS, "experts")
    triples = [
        (
            make.weight(128, 256, "fp8_block", scale=scale),
            make.weight(128, 256, "fp8_block", scale=scale),
            make.weight(256, 128, "fp8_block", scale=scale),
        )
        for _ in range(4)
    ]
    packed = ExpertsFp8(FACTS).pack(SampleExperts(triples), FACTS)
    assert packed.tag == FP8_EXPERTS and packed.tensors["ue8m0"] == (scale == "ue8m0")
    x, weights = make.normal(6, 256), make.uniform(6, 2).float()
    ids = torch.stack([make.order(4)[:2] for _ in range(6)]).int()
    oracle = expected(triples, x, weights, ids)
    kinds = (deep_gemm.ExpertsFp8, own.ExpertsFp8, grouped_fp8.ExpertsGrouped)
    for other in (kind(FACTS) for kind in kinds):
        assert relative_error(other.apply(x, weights, ids, packed), oracle) < 6e-2
    beside = own.ExpertsBlock7(FACTS)
    held = beside.hold_second_form(packed)
    assert beside.serves(6, held) and held.nbytes > 1.9 * packed.nbytes
    plain = own.ExpertsFp8(FACTS).apply(x, weights, ids, packed)
    assert torch.equal(beside.apply(x, weights, ids, held), plain)


def expected(triples, x, weights, ids):
    wide = facts_for(DEVICE, "float64")
    oracle = ReferenceExperts(wide)
    held = oracle.pack(SampleExperts(triples), wide)
    return oracle.apply(x.double(), weights.double(), ids, held)


def test_dense_experts():
    from ds_runtime_triton.experts import ExpertsDense, ExpertsFp8

    make = Maker(FACTS, "dense experts")
    triples = [(make.weight(128, 256), make.weight(128, 256), make.weight(256, 128))] * 4
    packed = ExpertsDense(FACTS).pack(SampleExperts(triples), FACTS)
    assert packed.tag == DENSE_EXPERTS
    x, weights = make.normal(6, 256), make.uniform(6, 2).float()
    ids = torch.stack([make.order(4)[:2] for _ in range(6)]).int()
    got = own.ExpertsDense(FACTS).apply(x, weights, ids, packed)
    assert relative_error(got, expected(triples, x, weights, ids)) < 1e-2
    cut = [tuple(make.weight(128, 128, "fp8_block", offset=(16, 16)) for _ in range(3))]
    held = ExpertsFp8(FACTS).pack(SampleExperts(cut), FACTS)
    assert held.tag == ExpertsFp8.tag, "dense weights are not what FP8_EXPERTS holds"


@pytest.mark.parametrize(
    ("model", "layers", "note"),
    [
        ("deepseek-v3", 61, "cuda.ExpertsFp8 from 3 to 16 rows"),
        ("deepseek-v3", 4, "cuda.ExpertsBlock7 from 3 to 320 rows"),  # for which there is room
        ("deepseek-v2-lite", 27, "cuda.ExpertsDense12 from 1 to 320 rows"),
    ],
)
def test_the_plan_says_which_rows_each_serves(tmp_path, model, layers, note):
    said = json.loads((FIXTURES / f"{model}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "num_hidden_layers": layers}))
    config = EngineConfig(model=str(tmp_path), plugins=("cuda", "triton"))
    plan = assemble(config, (), device="h200").plan
    (row,) = [r for r in plan.rows if r.op == "experts"]
    assert row.kernel.startswith("triton.") and note in row.note
    head = next(r.note for r in plan.rows if "lm_head" in r.sites)
    assert ("cuda.LinearDense12 from 1 to 128 rows" in head) == (layers < 61)  # or far too large
    more = [
        "cuda.ExpertsGrouped from 1280 to 10239 rows",
        "deep_gemm.ExpertsFp8 from 10240 rows on",
    ]
    assert (set(more) <= set(row.note.split("; "))) == (model == "deepseek-v3")


@pytest.mark.parametrize(
    ("settings", "forms", "size"),
    [
        ({}, ("LinearDense", "LinearFew", "ExpertsDense"), 55),
        ({"kv_memory": 100 << 30}, ("LinearDense", "LinearFew"), 32),
        ({"mem_fraction_static": 0.35}, ("LinearDense", "LinearFew"), 32),
        ({"mem_fraction_static": 0.3}, ("LinearDense", "LinearFew"), 32),
        ({"mem_fraction_static": 0.21}, (), 31),
    ],
)
def test_second_forms_of_weights_need_room(tmp_path, settings, forms, size):
    """Of V2-Lite's 31 GB in bfloat16; shared experts are slots, as they are not quantised."""
    shutil.copy(FIXTURES / "deepseek-v2-lite.json", tmp_path / "config.json")
    config = EngineConfig(model=str(tmp_path), plugins=("cuda", "triton"), **settings)
    assembly = assemble(config, tuple(settings), device="h200")
    found = {
        k.name
        for s in assembly.binding.shares.values()
        for k in s.kernels
        if k.footprint.second_form
    }
    assert found == {f"cuda.{name}12" for name in forms}
    for row in assembly.plan.rows:
        if row.op in ("linear", "experts"):
            has = "12 from 1 to" in row.note
            assert has == any(name.lower().startswith(row.op[:6]) for name in forms), row.note
    assert not any("shared_experts" in site for r in assembly.plan.rows for site in r.sites)
    needed = packed_bytes(assembly.model, assembly.binding, "bfloat16", 0)
    assert round(needed / 1e9) == size


def test_what_takes_most_gives_way_first(tmp_path):
    """V3 on eight devices: its experts do not fit twice, its head does."""
    shutil.copy(FIXTURES / "deepseek-v3.json", tmp_path / "config.json")
    config = EngineConfig(model=str(tmp_path), plugins=("cuda", "triton"), tp=8)
    plan = assemble(config, (), device="h200").plan
    notes = {r.op: r.note for r in plan.rows if r.op == "experts" or "lm_head" in r.sites}
    assert "Block7" not in notes["experts"] and "LinearDense12" in notes["linear"]


@pytest.mark.parametrize(
    ("without", "long", "longest"),
    [
        ((), "cuda.ExpertsGrouped", "deep_gemm.ExpertsFp8"),
        (("cuda.bindings",), "deep_gemm.ExpertsFp8", "deep_gemm.ExpertsFp8"),
        (("deep_gemm",), "cuda.ExpertsGrouped", "triton.experts_fp8"),
    ],
)
def test_rows_go_to_the_kernel_that_asks_first(tmp_path, without, long, longest):
    shutil.copy(FIXTURES / "deepseek-v3.json", tmp_path / "config.json")
    config = EngineConfig(model=str(tmp_path), plugins=("cuda", "triton"))
    binding = assemble(config, (), device="h200", without=without).binding
    shares = next(s for (op, *_), s in binding.shares.items() if op == "experts")
    few = "triton.experts_fp8" if "cuda.bindings" in without else "cuda.ExpertsFp8"
    served = {1: "triton.experts_fp8", 3: few, 16: few, 17: "triton.experts_fp8"}
    served |= {1279: "triton.experts_fp8", 4096: long, 10239: long, 10240: longest}
    if "cuda.bindings" not in without:
        served[1280] = long
    for rows, name in served.items():
        serving = next((k for k in shares.some if k.rows.holds(rows)), shares.rest)
        assert serving.name == name, rows
