"""Whole models on the xpu plugin and its stand-ins, against transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from vendor_doubles import install, xpu
from vendor_doubles.served import INDEXED, TRUE, demo, serve

from ds_runtime_kit.models.tiny import write_tiny, write_tiny_fp8

sys.path.append(str(Path(__file__).parents[1] / "core" / "model"))
import published_kinds


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    install(monkeypatch, xpu.MODULES, xpu.ADAPTERS)
    xpu.install_ops(monkeypatch)


@pytest.mark.slow
def test_v3_in_bfloat16(tmp_path):
    told = serve(tmp_path, write_tiny(tmp_path, "v3", 3, **TRUE), "xpu", "b60")
    assert told.kernels["linear"] == {"xpu.LinearOneDnn"}
    assert told.kernels["mla_decode"] == {"sgl_xpu.MlaDecode"}
    assert told.kernels["experts"] == {"vllm_xpu.ExpertsDense"}
    assert told.error < 0.04


def test_v3_in_fp8(tmp_path):
    told = serve(tmp_path, write_tiny_fp8(tmp_path, "v3", 3, **TRUE), "xpu", "b60")
    assert told.kernels["linear"] == {"xpu.LinearScaledMm", "xpu.LinearOneDnn"}
    assert told.kernels["experts"] == {"vllm_xpu.ExpertsFp8"}
    assert told.error < 0.3  # activations are rounded, which moves tokens to other experts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "experts"), [("mxfp8", "ExpertsMxfp8"), ("quark", "ExpertsMxfp4")]
)
def test_v3_in_few_bits(monkeypatch, tmp_path, kind, experts):
    """Weights stay what they are in experts, and are widened in other matmuls."""
    monkeypatch.setattr(published_kinds, "WIDTHS", TRUE)
    model = published_kinds.write_kind(tmp_path, kind, 3)
    told = serve(tmp_path, model, "xpu", "b60")
    assert told.kernels["experts"] == {f"vllm_xpu.{experts}"}
    assert told.error < 0.15


def test_the_demo_model_adds():
    """Its heads are narrower than what attention takes: experts and matmuls are the vendor's."""
    text, providers = demo("xpu", "b60")
    assert text.endswith("579") and {"xpu", "vllm_xpu"} <= providers


def test_v32(tmp_path):
    """Index scores in FP8 choose other tokens than in float32: the references do so, too, and keys
    that are in bfloat16 before do it again."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "index_n_heads": 64}
    model = write_tiny(tmp_path, "v32", 3, **INDEXED | heads)
    told = serve(tmp_path, model, "xpu", "b60")
    assert told.kernels["index_scores"] == {"vllm_xpu.index_scores"}
    assert told.kernels["index_prologue"] == {"vllm_xpu.index_prologue"}
    assert told.kernels["sparse_prefill"] == {"sgl_xpu.sparse_mla"}
    assert told.kernels["sparse_decode"] == {"sgl_xpu.sparse_mla"}
    pins = tuple(f"{op}=reference" for op in ("index_prologue", "index_scores", "sparse_prefill"))
    plain = serve(tmp_path, model, "xpu", "b60", pin=pins)
    assert plain.kernels["index_prologue"] == {"reference.index_prologue"}
    assert told.error < 1.5 * plain.error
