"""Norms and activations that quantise what an FP8 Linear multiplies next."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.ops.contracts.attention.absorbing import Absorbing
from ds_runtime_bench import shapes
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint

SETTINGS = {"dtype": "float32", "threads": 1, "kv_memory": 1 << 22}
PROMPTS = [list(range(3, 40)), [5, 6, 7], [8]]
FUSED = (
    "rms_norm_quantize",
    "add_rms_norm_quantize",
    "mha_prefill_quantize",
    "silu_mul_quantize",
)
APART = tuple(f"{op}=off" for op in FUSED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Inner widths of whole groups of 128."""
    with pytest.MonkeyPatch.context() as patch:
        shape = {**shapes.SHAPES["tiny-v3"], "q_lora_rank": 128, "intermediate_size": 256}
        shape["v_head_dim"] = 128
        patch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "groups": shape})
        patch.setattr(
            "ds_runtime_bench.checkpoints.checkpoint.SHAPES", shapes.SHAPES, raising=False
        )
        return make_checkpoint(tmp_path_factory.mktemp("m") / "groups", "groups", "fp8")


@pytest.fixture
def rounding(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("plugins")))
    import rounding

    yield rounding
    del sys.modules["rounding"]


@pytest.fixture(autouse=True)
def expands(monkeypatch):
    """Attention over prompts is never absorbed: its quantised form is what is asked for here."""
    monkeypatch.setattr(Absorbing, "of", lambda *_: None)


def answers(folder, plugin, **settings):
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    with LLM(folder, extra_plugins=[plugin], **{**SETTINGS, **settings}) as llm:
        plugin.calls.clear()  # of the first run, which is there to warm up
        found = llm.generate(PROMPTS, params)
        kernels = {r.op: r.kernel for r in llm.plan.rows}
    steps = [(e.token, e.logprob) for o in found for e in o.outputs[0].logprobs]
    return steps, dict(plugin.calls), kernels


def test_they_serve_where_the_linear_asks_and_change_nothing(folder, rounding):
    plain, calls, kernels = answers(folder, rounding, fusion=APART)
    assert not calls and {kernels.get(op) for op in FUSED} <= {"composed", None}
    fused, calls, kernels = answers(folder, rounding)
    assert fused == plain
    assert {kernels[op] for op in FUSED} == {f"rounding.{op}" for op in FUSED}
    # One dense layer, three with a query latent, two that add; shared experts are slots of the
    # routed ones. Attention quantises where a step has prompts alone.
    assert calls["norm"] == 4 * calls["silu"] and calls["sum"] == 2 * calls["silu"] > 0
    assert 0 < calls["attention"] < calls["norm"] and calls["attention"] % 3 == 0
    assert calls["linear"] == sum(n for name, n in calls.items() if name != "linear")


def test_attention_quantises_neither_beside_a_decode_nor_behind_a_prefix(folder, rounding):
    """Prompts in chunks of 16 have prefixes from the second on."""
    chunks = {"chunked_prefill_size": 16, "max_step_tokens": 16}
    plain, calls, _ = answers(folder, rounding, fusion=APART, **chunks)
    assert not calls
    fused, calls, _ = answers(folder, rounding, **chunks)
    assert fused == plain and calls["attention"] == 3  # the first chunk


def test_single_rows_come_as_they_are(folder, rounding):
    """The Linear says so per number of rows."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(folder, extra_plugins=[rounding], **SETTINGS) as llm:
        rounding.calls.clear()  # of the first run, which is there to warm up
        llm.generate([[8]], params)
    assert not rounding.calls
