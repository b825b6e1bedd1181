"""The CUDA plugin on compute capability 10: packed scales, whole models on stand-ins, refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vendor_doubles import cuda, install
from vendor_doubles.blackwell import packed_words
from vendor_doubles.served import INDEXED, TRUE, demo, on_host, serve

from ds_runtime.api import fp8_blocks, install_command
from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import Dims
from ds_runtime_cuda import blackwell, deep_gemm_packed, defaults, quant
from ds_runtime_kit.checks.conformance import TRUE_DIMS, facts_for
from ds_runtime_kit.devices import fake
from ds_runtime_kit.models import tiny
from examples import examples

sys.path.insert(0, str(Path(__file__).parents[1] / "core" / "model"))
import published_kinds

FIXTURES = Path(published_kinds.__file__).parent / "fixtures"

MLA = {"mla_decode": {"flashinfer.MlaDecodeTrtllm"}}


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    install(monkeypatch, cuda.MODULES, cuda.ADAPTERS)


def served(folder, model, experts, linear="cuda.LinearCublas", **settings):
    """The error of an engine whose kernels are these."""
    told = serve(folder, model, "cuda", "b200", **settings)
    assert told.kernels["experts"] == {experts} and linear in told.kernels["linear"]
    assert told.kernels.get("mla_decode", MLA["mla_decode"]) == MLA["mla_decode"]
    return told.error


def test_v3_in_bfloat16(tmp_path):
    model = tiny.write_tiny(tmp_path, "v3", 3, **TRUE)
    assert served(tmp_path, model, "cuda.ExpertsGroupedMm") < 0.04


def test_v3_in_fp8_with_float_scales_and_with_packed_powers(tmp_path):
    model = tiny.write_tiny_fp8(tmp_path, "v3", 3, **TRUE)
    kept = served(tmp_path, model, "flashinfer.ExpertsTrtllm", "flashinfer.LinearGroupwise")
    pins = tuple(f"{op}@layers.*=deep_gemm" for op in ("linear", "experts"))
    packed = "deep_gemm.ExpertsFp8Packed", "deep_gemm.LinearFp8Packed"
    rounded = served(tmp_path, model, *packed, pin=pins)
    other = serve(tmp_path, tiny.make_model("v3", 4, **TRUE), "cuda", "b200").error
    assert kept < 0.25 * other and rounded < 0.25 * other  # rounding moves tokens between experts


@pytest.mark.parametrize(
    ("kind", "experts", "linear", "pin"),
    [
        ("modelopt nvfp4", "ExpertsNvfp4", "LinearNvfp4", ()),
        pytest.param(  # the conformance suite asks these experts, too
            "modelopt nvfp4",
            "ExpertsNvfp4Cutlass",
            "LinearNvfp4",
            ("experts=ExpertsNvfp4Cutlass",),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "modelopt nvfp4",
            "ExpertsNvfp4CuteDsl",
            "LinearNvfp4",
            ("experts=ExpertsNvfp4CuteDsl",),
            marks=pytest.mark.slow,
        ),
        ("quark", "ExpertsMxfp4", None, ()),
    ],
)
def test_v3_in_fp4(monkeypatch, tmp_path, kind, experts, linear, pin):
    """Activations of four bits tell tokens apart: a model of other weights is twice as far."""
    monkeypatch.setattr(published_kinds, "WIDTHS", TRUE)
    model = published_kinds.write_kind(tmp_path, kind, 3)
    linear = f"flashinfer.{linear}" if linear else "cuda.LinearCublas"
    pin = tuple(p.replace("=", "=flashinfer.") for p in pin)
    error = served(tmp_path, model, f"flashinfer.{experts}", linear, pin=pin)
    other = tiny.make_model("v3", 4, **TRUE)
    assert error < 0.5 * serve(tmp_path, other, "cuda", "b200", pin=pin).error


def test_v3_in_mxfp8(monkeypatch, tmp_path):
    monkeypatch.setattr(published_kinds, "WIDTHS", TRUE)
    model = published_kinds.write_kind(tmp_path, "mxfp8", 3)
    told = serve(tmp_path, model, "cuda", "b200")
    assert "flashinfer.LinearMxfp8" in told.kernels["linear"] and told.error < 0.3


def test_v3_over_a_cache_in_fp8(tmp_path):
    """Keys of eight bits are 2⁻⁴ from their values, and move tokens to other experts: the
    reference over such a cache is as far."""
    model = tiny.write_tiny(tmp_path, "v3", 3, **TRUE)
    told = serve(tmp_path, model, "cuda", "b200", kv_cache_dtype="fp8")
    assert told.kernels["mla_decode"] == {"flashinfer.MlaDecodeTrtllmFp8"}
    pin = ("mla_decode=reference.ReferenceMlaDecode",)
    plain = serve(tmp_path, model, "cuda", "b200", kv_cache_dtype="fp8", pin=pin)
    assert told.error < 1.3 * plain.error


@pytest.mark.parametrize(
    ("fn", "changes", "said"),
    [
        ("MlaDecodeTrtllm", {"kv_dtype": "float8_e4m3fn"}, "pass --kv-cache-dtype auto"),
        ("MlaDecodeTrtllmFp8", {}, "reads a cache of float8_e4m3fn, not of bfloat16: pass"),
        ("MlaDecodeTrtllm", {"heads": 96}, "up to 64 heads, or 128, not 96: choose another --tp"),
        ("MlaDecodeTrtllmFp8", {"heads": 65}, "up to 64 heads, or 128, not 65"),
        ("MlaDecodeTrtllm", {"page_size": 16}, "page size 16, takes 32 or 64: pass --page-size 64"),
        ("sparse_mla", {"heads": 100}, "takes up to 64 heads, or 128, not 100"),
    ],
)
def test_decode_refuses_in_sentences(fn, changes, said):
    kernel = next(k for k in blackwell.ATTENTION if k.fn.endswith(f":{fn}"))
    dims = Dims({**TRUE_DIMS, "heads": changes.pop("heads", 128)})
    facts = facts_for(on_host("cuda", "b200"), "bfloat16", dims, 64)
    assert said in (refusal(kernel, replace(facts, **changes)) or "")


@pytest.mark.slow
def test_the_demo_model_adds():
    """Its heads are narrower than what the libraries take: dense matmuls are the platform's."""
    text, providers = demo("cuda", "b200")
    assert text.endswith("579") and "cuda" in providers


def test_v32_sparse(tmp_path):
    """Index scores in FP8 choose other tokens than in float32: the references do so, too."""
    model = tiny.write_tiny(tmp_path, "v32", 3, **INDEXED)
    told = serve(tmp_path, model, "cuda", "b200", kv_cache_dtype="auto")
    sparse = {"flashinfer.sparse_mla"}
    assert told.kernels["sparse_prefill"] == told.kernels["sparse_decode"] == sparse
    pins = tuple(f"{op}=reference.sparse_mla" for op in ("sparse_prefill", "sparse_decode"))
    plain = serve(tmp_path, model, "cuda", "b200", kv_cache_dtype="auto", pin=pins)
    assert told.error < 1.2 * plain.error


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]}
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}


@pytest.mark.parametrize(
    ("config", "without", "linear", "experts"),
    [
        (NVFP4, (), "flashinfer.LinearNvfp4", "flashinfer.ExpertsNvfp4"),
        (NVFP4, ("flashinfer",), "triton.", "triton."),
        (MXFP8, (), "flashinfer.LinearMxfp8", "triton."),
    ],
)
def test_auto_takes_the_matrix_units_of_a_format(tmp_path, config, without, linear, experts):
    raw = json.loads((FIXTURES / "deepseek-v3.json").read_text())
    raw |= {"num_hidden_layers": 4, "first_k_dense_replace": 2, "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan = fake.plan(str(tmp_path), "sm100", without=without).plan
    (row,) = (r for r in plan.rows if r.op == "experts")
    assert row.kernel.startswith(experts)
    mlp = {r.kernel for r in plan.rows if r.op == "linear" and any("mlp" in s for s in r.sites)}
    assert all(kernel.startswith(linear) for kernel in mlp) and mlp
    if without:
        said = dict(row.refused)["flashinfer.ExpertsNvfp4"]
        assert said == f"flashinfer-python is not installed: {install_command('cuda')}"


def test_fp8_latents_are_wished_for_where_attention_is_sparse():
    facts = facts_for(on_host("cuda", "b200"), "bfloat16", TRUE_DIMS, 64)
    dense = replace(facts, dims=type(TRUE_DIMS)({k: TRUE_DIMS[k] for k in ("heads", "kv_lora")}))
    hopper = replace(facts, device=on_host("cuda", "h200"))
    wished = [{c.field for c in defaults(f)} for f in (facts, dense, hopper)]
    assert ["kv_cache_dtype" in w for w in wished] == [True, False, False]


@pytest.mark.parametrize("quantized", [True, False])
def test_shared_experts_are_apart_where_routed_ones_are_quantised(quantized):
    facts = facts_for(on_host("cuda", "b200"), "bfloat16", TRUE_DIMS, 64)
    wished = {c.field: c.value for c in defaults(replace(facts, quantized=quantized))}
    assert wished.get("fusion") == (("shared_experts=off",) if quantized else None)


@pytest.mark.parametrize(
    ("fn", "shape", "said"),
    [
        ("LinearNvfp4", (48, 256), "takes outputs in multiples of 32, not 48"),
        ("LinearNvfp4", (64, 96), "takes inputs in multiples of 64, not 96"),
        ("LinearMxfp8", (64, 96), "takes inputs in multiples of 128, not 96"),
        ("ExpertsNvfp4", (8, 192, 256), "needs multiples of 128, and 192 is none"),
        ("ExpertsMxfp4", (8, 128, 256), "needs multiples of 256, and 128 is none"),
        ("LinearFp8Packed", (12, 256), "a multiple of 8 outputs, not 12"),
    ],
)
def test_refusals_are_sentences_with_their_reason(fn, shape, said):
    kernel = next(k for k in blackwell.ALL if k.fn.endswith(f":{fn}"))
    facts = facts_for(on_host("cuda", "b200"), "bfloat16", TRUE_DIMS, 64)
    there = replace(facts, shape=shape, weight_format=min(kernel.formats))
    assert said in (refusal(kernel, there) or "")
    hopper = replace(there, device=on_host("cuda", "h200"))
    assert "made for sm100 and sm103, not for sm90" in (refusal(kernel, hopper) or "")


@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 9999))
@settings(max_examples=examples(40), deadline=None)
def test_exponents_come_back_from_their_words(rows, groups, seed):
    torch.manual_seed(seed)
    scale = torch.exp2(torch.randint(-126, 128, (-(-rows // 128), groups)).float())
    words = deep_gemm_packed.pack_exponents(scale, rows)
    assert words.stride(0) == 1 and words.stride(1) % 4 == 0
    assert torch.equal(deep_gemm_packed.unpack_exponents(words, groups), scale)
    told = packed_words(words, rows, 128 * groups)
    assert torch.equal(told, scale.repeat_interleave(128, 0)[:rows])


@given(st.integers(0, 9999))
@settings(max_examples=examples(20), deadline=None)
def test_codes_move_to_the_power_above_and_powers_stay(seed):
    torch.manual_seed(seed)
    scale = torch.exp2(torch.empty(2, 1).uniform_(-20, 20))
    values = torch.randn(200, 128).clamp(-3, 3).mul(100).to(torch.float8_e4m3fn)
    moved, power = deep_gemm_packed.rounded(values, scale)
    assert ((power >= scale) & (power < 2 * scale)).all()
    assert torch.equal(power, torch.exp2(torch.ceil(torch.log2(scale.double()))).float())
    was, now = fp8_blocks.spread(values, scale), fp8_blocks.spread(moved, power)
    assert ((was - now).norm() / was.norm()) < 0.04
    again = deep_gemm_packed.rounded(moved, power)
    assert torch.equal(again[0].view(torch.uint8), moved.view(torch.uint8))
    assert torch.equal(quant.power_above(power), power)
