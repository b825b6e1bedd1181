"""Norms and activations that quantise what an FP8 Linear multiplies next."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.bench import shapes
from ds_runtime.bench.checkpoint import make_checkpoint

SETTINGS = {"dtype": "float32", "threads": 1, "kv_memory": 1 << 22}
PROMPTS = [list(range(3, 40)), [5, 6, 7], [8]]
FUSED = ("rms_norm_quantize", "silu_mul_quantize")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Inner widths of whole groups of 128."""
    with pytest.MonkeyPatch.context() as patch:
        shape = {**shapes.SHAPES["tiny-v3"], "q_lora_rank": 128, "intermediate_size": 256}
        patch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "groups": shape})
        patch.setattr("ds_runtime.bench.checkpoint.SHAPES", shapes.SHAPES, raising=False)
        return make_checkpoint(tmp_path_factory.mktemp("m") / "groups", "groups", "fp8")


@pytest.fixture
def rounding(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("plugins")))
    import rounding

    yield rounding
    del sys.modules["rounding"]


def answers(folder, plugin, **settings):
    plugin.calls.clear()
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    with LLM(folder, extra_plugins=[plugin], **{**SETTINGS, **settings}) as llm:
        found = llm.generate(PROMPTS, params)
        kernels = {r.op: r.kernel for r in llm.plan.rows}
    steps = [(e.token, e.logprob) for o in found for e in o.outputs[0].logprobs]
    return steps, dict(plugin.calls), kernels


def test_they_serve_where_the_linear_asks_and_change_nothing(folder, rounding):
    plain, calls, kernels = answers(folder, rounding, disable_fusion=FUSED)
    assert not calls and {kernels.get(op) for op in FUSED} <= {"composed", None}
    fused, calls, kernels = answers(folder, rounding)
    assert fused == plain
    assert {kernels[op] for op in FUSED} == {f"rounding.{op}" for op in FUSED}
    # One dense layer, three with a query latent; shared experts are slots of the routed ones.
    assert calls["norm"] == 3 * calls["silu"] > 0
    assert calls["linear"] == calls["norm"] + calls["silu"]


def test_single_rows_come_as_they_are(folder, rounding):
    """The Linear says so per number of rows."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(folder, extra_plugins=[rounding], **SETTINGS) as llm:
        rounding.calls.clear()  # of the first run, which is there to warm up
        llm.generate([[8]], params)
    assert not rounding.calls
