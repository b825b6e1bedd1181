"""Steps that are recorded on the CPU: kernels, memory, what cannot be recorded, whole engines."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.engine.capture.recorder import Recorder
from ds_runtime.errors import PluginError
from ds_runtime.ops.contract import FP8_GROUPS
from ds_runtime.ops.kernel import Promises
from ds_runtime.platform.recording import CaptureError
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_cpu import kernels, native, small
from ds_runtime_cpu.graphs import HostGraphs
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.captures import check_captures
from ds_runtime_kit.checks.conformance import facts_for
from ds_runtime_kit.models import tiny
from ds_runtime_kit.models.adapters import write_adapter

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no native library")
OFFERED = (
    *(*kernels.ATTENTION, *kernels.MOE, *kernels.ROUTING),
    *(*kernels.LINEAR_KERNELS, *kernels.SMALL_OPS),
)
EAGER = ("mha_prefill", "sparse_prefill")  # prefills are not captured


@pytest.mark.parametrize(
    "kernel",
    [k for k in OFFERED if k.promises.graph_safe and k.op.name not in EAGER],
    ids=lambda k: f"{k.op.name}-{k.name}",
)
def test_what_a_step_calls_is_recorded(kernel):
    ran = 0
    for dtype in ("float32", "bfloat16"):
        for fmt in sorted(kernel.formats) or [""]:
            for kv in ("", "float8_e4m3fn", FP8_GROUPS):
                facts = facts_for(CpuPlatform().info(), dtype, kv_dtype=kv)
                facts = replace(facts, weight_format=fmt)
                if kernel.refuse(facts) is not None:
                    continue
                found = check_captures(kernel, facts, HostGraphs(), load_plugins().offers(facts))
                assert [r for r in found if not r.ok] == []
                ran += len(found)
    assert ran or kernel.refuse(facts_for(CpuPlatform().info(), "bfloat16")) is not None


@pytest.mark.parametrize(
    "kernel", [k for k in OFFERED if not k.promises.graph_safe], ids=lambda k: k.name
)
def test_what_says_that_it_cannot_be_cannot(kernel):
    facts = facts_for(CpuPlatform().info(), "bfloat16")
    if kernel.refuse(facts) is not None:
        pytest.skip("it does not run here")
    found = check_captures(
        replace(kernel, promises=Promises()), facts, HostGraphs(), load_plugins().offers(facts)
    )
    assert any(not r.ok for r in found)


# Shapes in which one tensor is copied into another, or joined to it.
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=3)


def made(shape, dtype, gap):
    """A view whose rows lie `gap` apart."""
    wide = torch.randn(*shape[:-1], shape[-1] + gap).to(dtype)
    return wide[..., gap:]


def check_replay(run, out, *inputs):
    """A replay with other inputs gives what a call gives."""
    replay = HostGraphs().capture(run)
    for x in inputs:
        x.copy_(torch.randn(x.shape) if x.is_floating_point() else x.flip(0))
    run()
    want = out.clone()
    out.zero_()
    replay()
    assert torch.equal(out, want)
    return replay


@given(SIZES, DTYPES, DTYPES, st.integers(0, 3), st.integers(0, 3))
def test_copies(shape, source, target, gap, other):
    x, out = made(shape, source, gap), made(shape, target, other)
    check_replay(lambda: out.copy_(x), out, x)


@given(SIZES, DTYPES, st.integers(0, 3), st.data())
def test_joined(shape, dtype, gap, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    parts = []
    for n in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)):
        own = list(shape)
        own[dim] = n
        parts.append(made(own, dtype, gap))
    shape[dim] = sum(p.shape[dim] for p in parts)
    out = torch.empty(shape, dtype=dtype)
    check_replay(lambda: out.copy_(torch.cat(parts, dim)), out, *parts)


@given(st.integers(1, 5), st.integers(1, 70), DTYPES, st.integers(0, 3), st.sampled_from([1, 2]))
def test_sums(rows, n, dtype, gap, alpha):
    x, y, out = (made((rows, n), dtype, gap) for _ in range(3))

    def run():
        out.copy_(y)
        out.add_(x, alpha=alpha)

    check_replay(run, out, x, y)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.data())
def test_selected_rows(held, rows, gap, data):
    numbers = st.lists(st.integers(0, held - 1), min_size=rows, max_size=rows)
    which = torch.tensor(data.draw(numbers))
    for table in (torch.arange(held), made((held, 7), torch.float32, gap)):
        out = torch.empty(rows, *table.shape[1:], dtype=table.dtype)

        def run(table=table, out=out):
            out.copy_(table.index_select(0, which))

        check_replay(run, out, which)


def test_other_ops_of_torch_run_between():
    x, out = torch.randn(3, 8), torch.empty(3, 8)
    best = torch.empty(3, dtype=torch.int64)

    def run():
        values, places = torch.sort(small.rms_norm(x, torch.ones(8), 1e-6), dim=1)
        out.copy_(small.rms_norm(values.cumsum(1), torch.ones(8), 1e-6))
        best.copy_(places[:, -1])

    weights = torch.ones(8)

    def kept():
        values, places = torch.sort(small.rms_norm(x, weights, 1e-6), dim=1)
        out.copy_(small.rms_norm(values.cumsum(1), weights, 1e-6))
        best.copy_(places[:, -1])

    check_replay(kept, out, x)
    check_replay(run, out, x)  # and so is what a step makes for itself
    assert torch.equal(best, x.argmax(1))


def test_recordings_work_in_the_memory_of_one():
    backend, weight = HostGraphs(), torch.ones(512)
    x = torch.randn(64, 512)
    outs = [torch.empty(64, 512) for _ in range(3)]

    def step(out):
        y = x
        for _ in range(20):
            y = small.rms_norm(y, weight, 1e-6)
        out.copy_(y)

    replays = [backend.capture(lambda out=out: step(out)) for out in outs]
    gc.collect()
    blocks = [b for some in backend._pool._free.values() for b in some]
    assert sum(b.nbytes for b in blocks) <= 3 * x.nbytes
    others = [torch.full((64, 512), float("nan")) for _ in range(50)]  # where freed memory was
    for replay, out in zip(replays, outs, strict=True):
        x.normal_()
        want = torch.empty_like(x)
        step(want)
        replay()
        assert torch.equal(out, want)
    assert all(o.isnan().all() for o in others)


def test_code_of_its_own_is_seen():
    """A kernel that takes an address to compute by itself: a replay would not run it."""
    x, out = torch.randn(4), torch.empty(4)

    def run():
        ctypes.memmove(out.data_ptr(), x.data_ptr(), 16)

    with pytest.raises(CaptureError, match=r"2 addresses .* Promises\(graph_safe=False\)"):
        HostGraphs().capture(run)
    weight = torch.ones(4)

    def beside():
        ctypes.memmove(out.data_ptr(), x.data_ptr(), 16)
        small.rms_norm(x.view(1, 4), weight, 1e-6)

    with pytest.raises(CaptureError, match="1 addresses"):
        HostGraphs().capture(beside)


READS = [torch.Tensor.tolist, torch.Tensor.numpy, float, torch.nonzero, np.asarray, np.from_dlpack]


@pytest.mark.parametrize("read", READS)
def test_what_looks_at_values_is_refused(read):
    x = torch.ones(1)
    with pytest.raises(CaptureError, match="waits for the device"):
        HostGraphs().capture(lambda: read(x))
    assert not native._recorders
    out = torch.empty(1)  # the next one is not disturbed
    check_replay(lambda: out.copy_(x * 2), out, x)


def test_an_exception_of_a_step_is_its_own():
    def run():
        torch.empty(3).data_ptr()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        HostGraphs().capture(run)
    assert not native._recorders


def test_ops_that_write_where_they_are_told():
    x, out = torch.randn(2, 8), torch.empty(4, 8)
    check_replay(lambda: torch.cat((x, x), out=out), out, x)


def written(folder, shape):
    """A tiny model, or the one with a layer that drafts."""
    if shape != "demo":
        tiny.write_tiny(folder, shape)
    return "demo" if shape == "demo" else str(folder)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("v3", {"max_loras": 2, "lora_target_modules": ("o_proj",)}),
        ("v32", {}),
        ("demo", {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 2}),
        ("demo", {"speculative_algorithm": "NEXTN"}),
        ("v3", {}),
        ("v3", {"disable_graph": True, "max_loras": 2, "lora_target_modules": ("o_proj",)}),
    ],
)
def test_every_kind_of_step_is_captured_late(tmp_path, shape, settings):
    """But with adapters of routed experts. Kernels that read values serve steps op by op alone."""
    given = {"platform": "cpu", "model": written(tmp_path, shape), **settings}
    assembly = assemble(EngineConfig(**given), tuple(given))
    captured = "disable_graph" not in settings
    assert assembly.facts.graph_capture is captured
    if "max_loras" in settings:
        assert {d.kernel for d in assembly.binding.decisions if d.op == "lora_delta"} == {
            "cpu.lora_delta_masked" if captured else "cpu.lora_delta"
        }


def test_calls_of_other_threads_are_not_recorded():
    x, weight, out = torch.randn(2, 8), torch.ones(8), torch.empty(2, 8)
    elsewhere = torch.randn(2, 8)

    def run():
        other = threading.Thread(target=lambda: small.silu_mul(elsewhere))
        other.start()
        other.join()
        out.copy_(small.rms_norm(x, weight, 1e-6))

    backend = HostGraphs()
    seen = []
    with native.recorded(lambda *call: seen.append(call)):
        run()
    assert len(seen) == 1
    replay = backend.capture(lambda: out.copy_(small.rms_norm(x, weight, 1e-6)))
    replay()


# When steps are captured.


def test_a_step_is_captured_once_it_has_come_often():
    runs, x = [], torch.zeros(1)

    def run():
        runs.append(1)
        x.add_(1)

    replay = Recorder(HostGraphs(), 3).record(run, "a step")
    for _ in range(10):
        replay()
    assert x == 10 and len(runs) == 4  # a capture on the host runs the step as well


def test_one_that_cannot_be_captured_goes_on(caplog):
    x = torch.zeros(1)

    def run():
        x.add_(int(x.item() < 100))

    late = Recorder(HostGraphs(), 2)
    replays = [late.record(run, "a step") for _ in range(2)]  # as of two sizes
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            for replay in replays:
                replay()
    assert x == 20
    said = [r.message for r in caplog.records]
    assert len(said) == 1 and said[0].startswith("decode steps continue op by op: CaptureError: ")


def test_one_of_several_ranks_that_cannot_be_captured_is_an_error():
    """Run again as a whole it would give others twice what they wait for."""
    x = torch.zeros(1)
    replay = Recorder(HostGraphs(), 2, ranks=2).record(lambda: x.add_(int(x.item() < 9)), "a step")
    replay()
    replay()
    with pytest.raises(PluginError, match=r"^a step cannot be captured: .*; --disable-graph runs"):
        replay()


TREE = {
    "dtype": "float32",
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 2,
}


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("v2-lite", {"dtype": "bfloat16"}),
        ("v3", {"dtype": "float32"}),
        ("v3", {"dtype": "bfloat16", "quantize": "int8"}),
        ("v3", {"dtype": "bfloat16", "quantize": "int4", "kv_cache_dtype": "fp8"}),
        ("v32", {"dtype": "float32"}),
        ("demo", {"dtype": "float32", "speculative_algorithm": "NEXTN"}),
        ("demo", TREE),
        (
            "demo",
            {
                "dtype": "bfloat16",
                "speculative_algorithm": "NEXTN",
                "speculative_num_steps": 1,
                "speculative_draft_quantize": "fp8",
            },
        ),
        ("v3", {"dtype": "bfloat16", "tp": 2}),
        ("v32", {"dtype": "float32", "tp": 2, "ep": 2, "enable_dp_attention": True}),
        ("demo", {**TREE, "tp": 2, "ep": 2, "enable_dp_attention": True}),
        ("demo", {"speculative_algorithm": "NEXTN", "tp": 2, "batch_invariant": True}),
        ("demo", {"tp": 2, "ep": 2, "enable_dp_attention": True, "batch_invariant": True}),
    ],
)
def test_answers_are_those_of_steps_op_by_op(tmp_path, monkeypatch, shape, settings):
    model = written(tmp_path, shape)
    found, replays, capture = [], [], HostGraphs.capture

    def counted(self, run):
        replay = capture(self, run)

        def counting():
            replays.append(1)
            replay()

        return counting

    monkeypatch.setattr(HostGraphs, "capture", counted)
    prompts = [[(7 * i + j) % 250 + 2 for j in range(3 + 5 * i)] for i in range(4)]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=44, ignore_eos=True, temperature=0.8, seed=3),
        SamplingParams(max_tokens=60, ignore_eos=True),
        SamplingParams(max_tokens=120, ignore_eos=True, frequency_penalty=0.5),
    ]
    common = {"platform": "cpu", "threads": 1, "kv_memory": 4_000_000, "page_size": 8}
    common["context_length"] = 256
    for disable_graph in (True, False):
        with LLM(model, disable_graph=disable_graph, **common, **settings) as llm:
            if not disable_graph:
                assert "disable_graph" not in [name for name, *_ in llm._assembly.plan.changes]
            outputs = llm.generate(prompts, params)
            found.append([(o.token_ids, o.logprobs) for o in outputs])
        assert bool(replays) is not disable_graph
    assert found[0] == found[1]
    assert len(replays) > 15


def test_answers_of_adapters_are_those_of_steps_op_by_op(tmp_path):
    """In the middle of captured steps, requests with an adapter come and go."""
    config = load_config(resolve_model("demo"))
    write_adapter(tmp_path / "a", config, lambda module: ".mlp.experts." not in module, rank=4)
    prompts = [[(7 * i + j) % 250 + 2 for j in range(3 + 5 * i)] for i in range(4)]
    params = [SamplingParams(max_tokens=20 + 9 * i, ignore_eos=True) for i in range(4)]
    found = []
    for disable_graph in (True, False):
        with LLM(
            "demo",
            platform="cpu",
            dtype="float32",
            threads=1,
            kv_memory=4_000_000,
            context_length=256,
            lora=(f"a={tmp_path / 'a'}",),
            disable_graph=disable_graph,
        ) as llm:
            for names in (["a", None, "a", None], [None] * 4):
                outputs = llm.generate(prompts, params, lora=names)
                found.append([o.token_ids for o in outputs])
    assert found[:2] == found[2:] and found[0] != found[1]


def test_a_tree_whose_levels_cannot_all_be_recorded_grows_op_by_op(monkeypatch):
    """A level reads what the one before it made, and that is elsewhere in every step."""
    found, accepted, capture, counts = [], [], HostGraphs.capture, []

    def sometimes(self, run):
        counts.append(1)
        if isinstance(run, partial) and run.args == (0,):
            raise CaptureError("not this one")
        return capture(self, run)

    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(HostGraphs, "capture", sometimes)
        small = {"platform": "cpu", "threads": 1, "kv_memory": 4_000_000, "context_length": 256}
        with LLM("demo", **small, **TREE) as llm:
            found.append([o.token_ids for o in llm.generate([[5, 6, 7], [8, 9]], params)])
            accepted.append(llm.stats().accepted_tokens)
    assert found[0] == found[1] and counts and accepted[0] > 10
    assert accepted[1] == accepted[0], "drafts are as often right"


def test_the_first_recording_loads_nothing():
    """Least of all torch's compiler, which takes a second that a request would wait."""
    code = """
import sys, torch
from ds_runtime_cpu import small
from ds_runtime_cpu.graphs import HostGraphs
x, weight, out = torch.randn(2, 8), torch.ones(8), torch.empty(2, 8)
before = set(sys.modules)
with torch.inference_mode():
    replay = HostGraphs().capture(lambda: out.copy_(small.rms_norm(x, weight, 1e-6)))
    replay()
print(sorted(name for name in set(sys.modules) - before if name.startswith("torch")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
