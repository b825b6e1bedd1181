"""`bench ops`: what is measured, with what inputs, and how it is told."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.ops.contracts.work import Sizes
from ds_runtime.ops.reference.matrices.linear import ReferenceLinear
from ds_runtime.ops.table import OPS
from ds_runtime.platform import ceilings
from ds_runtime.platform.contract import Ceilings, Platform
from ds_runtime_bench import record
from ds_runtime_bench.ops import measure, report
from ds_runtime_bench.ops.subjects import Memory, Timed
from ds_runtime_bench.shapes import config_of
from ds_runtime_cpu.platform import CpuPlatform

KNOWN = Ceilings(100e9, {"bfloat16": 1e12, "float32": 1e11, "int8": 2e12}, 1 << 20, "given")


@pytest.fixture(autouse=True)
def given_ceilings(monkeypatch):
    monkeypatch.setattr(CpuPlatform, "ceilings", lambda self, rank=0: KNOWN)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def assembled(shape="tiny-v3", weights="bfloat16", **settings):
    settings = {"platform": "cpu", "dtype": "bfloat16", "threads": 1} | settings
    return measure.assembled(EngineConfig(**settings), frozenset(settings), shape, weights)


def measured(assembly, only=(), tokens=(1, 3), kernels=()):
    measurement = measure.Measurement(assembly, 20, 32 << 20, 1e-4)
    return list(measurement.figures(only, tokens, kernels))


def timed(measurement, group):
    place = measurement.place(group, group.bound)
    return Timed(group.bound, place, measurement._memory())


def test_every_op_can_be_measured():
    for name, op in OPS.items():
        assert op.cost is not None, name
        assert set(op.cost.calls) <= set(op.parameters) - {"pack", "state", "prepare"}, name
        assert set(op.cost.step) <= set(op.cost.calls), name


@pytest.mark.parametrize(
    ("shape", "weights", "flags"),
    [
        ("tiny-v3", "bfloat16", {}),
        ("tiny-v2-lite", "fp8", {}),
        ("tiny-v3", "bfloat16", {"quantize": "int8"}),
        ("tiny-v3", "bfloat16", {"quantize": "int4"}),
        ("tiny-v3", "bfloat16", {"disable_mla": True}),
        ("tiny-v32", "bfloat16", {}),
    ],
)
def test_every_bound_kernel_of_a_model_is_measured(shape, weights, flags):
    assembly = assembled(shape, weights, **flags)
    figures = measured(assembly)
    assert not [f for f in figures if f.error]
    wanted = {(s.op, k.name) for s, k in assembly.binding.choices if k is not None}
    assert {(f.op, f.kernel) for f in figures} == wanted
    places = sum(k is not None for _, k in assembly.binding.choices)
    one = {(f.op, f.what, f.kernel): f.sites for f in figures}
    assert sum(one.values()) == places
    for f in figures:
        assert f.bound and f.us > 0 and f.tokens in (1, 3)
        assert f.of_bandwidth == pytest.approx(f.gb_per_s / 100)
    methods = {f.method for f in figures if f.op == "mla_absorb"}
    assert methods == {"apply_q", "apply_v", "expand"}


def test_rates_follow_from_time_and_work():
    (figure,) = measured(assembly := assembled(), ["route"], [4])
    nbytes = 4 * (16 * 4 + 4 * 8) + 16 * 4  # logits, weights and ids, and the bias
    sizes = Sizes(facts=assembly.facts, routing=assembly.model.routing)
    flops = OPS["route"].cost.calls[""][1](sizes, 4).flops
    assert flops == 4 * 4 * 16
    assert figure.gb_per_s == pytest.approx(nbytes / figure.us / 1e3)
    assert figure.gflop_per_s == pytest.approx(flops / figure.us / 1e3)
    assert figure.of_compute == pytest.approx(figure.gflop_per_s / 100)  # float32's ceiling


def test_all_kernels_that_accept_are_measured():
    figures = measured(assembled(), ["linear"], [2], ["all"])
    names = {f.kernel for f in figures}
    assert {"reference.ReferenceLinear"} < names
    some = measured(assembled(), ["linear"], [2], ["reference.ReferenceLinear"])
    assert {f.kernel for f in some if not f.bound} == {"reference.ReferenceLinear"}
    for what in {f.what for f in figures}:
        assert [f.bound for f in figures if f.what == what].count(True) == 1


def test_a_named_kernel_that_refuses_says_why():
    assembly = assembled()
    figures = measured(assembly, ["mla_decode"], [2, 2], ["triton.mla_decode"])
    assert [f.tokens for f in figures] == [2, 2]  # once, and the refusal
    assert figures[0].bound and not figures[0].error
    assert figures[1].kernel == "triton.mla_decode" and figures[1].error.startswith("refused: ")
    assert "refused: " in report.render(figures[1])
    others = measured(assembly, ["mla_decode"], [2], ["all"])
    assert not [f for f in others if f.error.startswith("refused")]


def test_inputs_that_memory_does_not_hold_are_said_so(monkeypatch):
    assembly = assembled()
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ):

        def at(self, tokens, error=error):
            raise error

        monkeypatch.setattr(Timed, "at", at)
        (figure,) = measured(assembly, ["route"], [10**9])
        assert figure.error.startswith("more memory than there is: take fewer --tokens")


def test_the_time_is_the_median_of_calls():
    measurement = measure.Measurement(assembled(), 20, None, 0.05)
    slow = measurement.time([lambda: time.sleep(0.002), lambda: time.sleep(0.002)])
    assert 0.002 <= slow < 0.02
    waits = iter([0.0, 0.0] + [0.001] * 30 + [0.03] + [0.001] * 1000)
    assert measurement.time([lambda: time.sleep(next(waits))]) < 0.01


def test_queued_work_is_timed_until_it_is_done(monkeypatch):
    """A platform whose calls return at once: the time is that of synchronize."""
    queue = []

    def drain(self):
        time.sleep(0.001 * len(queue))
        queue.clear()

    measurement = measure.Measurement(assembled(), 20, None, 0.05)
    monkeypatch.setattr(CpuPlatform, "asynchronous", True)
    monkeypatch.setattr(CpuPlatform, "captures", False)
    monkeypatch.setattr(CpuPlatform, "synchronize", drain)
    spent = measurement.time([lambda: queue.append(1)] * 3)
    assert 0.001 <= spent < 0.003


def test_a_recording_is_replayed_where_the_device_can(monkeypatch):
    replays = []

    class Backend:
        def capture(self, run):
            return lambda: replays.append(1)

    measurement = measure.Measurement(assembled(), 20, None, 0.01)
    monkeypatch.setattr(CpuPlatform, "asynchronous", True)
    monkeypatch.setattr(CpuPlatform, "captures", True)
    monkeypatch.setattr(CpuPlatform, "graph_backend", lambda self, rank=0: Backend())
    calls = []
    measurement.time([lambda: calls.append(1)])
    assert len(replays) >= 3
    assert len(calls) < 40  # warm-up only


def test_a_kernel_that_raises_is_a_figure(monkeypatch):
    def apply(self, x, packed):
        raise RuntimeError("no luck")

    assembly = assembled(pin=("linear=reference.ReferenceLinear",))
    monkeypatch.setattr(ReferenceLinear, "apply", apply)
    figures = measured(assembly, ["linear"], [1])
    assert figures and all(f.error == "RuntimeError: no luck" for f in figures)
    assert "no luck" in report.render(figures[0])


def test_copies_are_twice_the_cache_where_the_model_is_larger():
    memory = Memory(cache=100, model=1000, most=500)
    assert memory.copies(10) == 20
    assert memory.copies(300) == 1
    assert memory.copies(30) == 7
    assert Memory(100, 1000, 60).copies(10) == 6  # no more than there is room for
    assert Memory(100, 90, 500).copies(10) == 1  # the model itself stays in the cache
    assert memory.cold(10, 20) and memory.cold(300, 1)
    assert not memory.cold(10, 6)
    assert Memory(100, 90, 500).cold(10, 1)


def test_copies_have_memory_of_their_own():
    """Pointers of different copies differ, and all give the same result."""
    assembly = assembled(pin=("linear=reference.ReferenceLinear",))
    measurement = measure.Measurement(assembly, 20, 32 << 20, 1e-4)
    group = next(g for g in measure.groups(assembly, ["linear"]) if g.sites[0].shape == (640, 128))
    maker = timed(measurement, group)
    pointers = {p.tensors["weight"].data_ptr() for p in maker.packed}
    assert len(pointers) == len(maker.packed) == math.ceil(2 * (1 << 20) / (640 * 128 * 2))
    (subject,) = maker.at(3)
    first, *rest = (call() for call in subject.calls)
    assert all(torch.equal(first, other) for other in rest)
    assert subject.cold


def test_experts_that_do_not_fit_are_fewer():
    assembly = assembled("tiny-v3")
    group = measure.groups(assembly, ["experts"])[0]
    one = 3 * 192 * 128 * 2
    maker = timed(measure.Measurement(assembly, 20, 6 * one, 1e-4), group)
    assert maker.place.facts.shape[0] == 6
    (subject,) = maker.at(2)
    assert subject.note == "6 of 17 experts fit"
    assert subject.calls[0]().shape == (2, 128)


def test_work_counts_the_experts_that_even_routing_reaches():
    group = measure.groups(assembly := assembled("tiny-v3"), ["experts"])[0]
    (subject,) = timed(measure.Measurement(assembly, 20, 32 << 20, 1e-4), group).at(1)
    assert subject.work.weights == 5 * 3 * 192 * 128 * 2  # four and a shared one


def test_widths_of_small_ops_come_from_their_neighbours():
    found = {(g.op, g.width) for g in measure.groups(assembled("tiny-v3"))}
    assert {("silu_mul", 320), ("add_rms_norm", 128)} < found  # shared experts are slots
    assert ("rms_norm", 96) in found  # of the query latent


def test_bytes_of_a_step(capsys):
    command = ["bench", "ops", "--shape", "lite-8", "--bytes", "--tokens", "1", "4", "--context"]
    assert main([*command, "1", "--json", "--platform", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    device = assembled("tiny-v3").facts.device
    halves = 1 if "bfloat16" in device.fast_dtypes else 2  # else float32
    if device.arch in ("x86-64-avx512bf16", "x86-64-amx"):
        halves *= 0.75  # 12 bits a weight
    assert found["all"]["1"] == pytest.approx(1.747e9 * halves, rel=1e-2)
    one, four = (found["step_bytes"][n]["experts"] for n in ("1", "4"))
    reached = 64 * (1 - (1 - 6 / 64) ** 4)
    assert four / one == pytest.approx((reached + 2) / (6 + 2), rel=1e-3)  # two are shared
    assert main([*command, "1", "--platform", "cpu"]) == 0
    assert "batch 4" in capsys.readouterr().out


def test_the_verb(capsys):
    command = ["bench", "ops", "--shape", "tiny-v2-lite", "--op", "linear", "--tokens", "1"]
    command += ["--seconds", "0.001", "--threads", "1", "--platform", "cpu"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ceilings"]["bandwidth"] == 100e9
    assert {f["op"] for f in found["figures"]} == {"linear"}
    assert found["model"] == "tiny-v2-lite" and found["commit"] and found["command"]
    assert main(command) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0].startswith("ceilings measured: read 100.0 GB/s")
    assert "640×128 dense" in "\n".join(text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--op", "liner"], "--op 'liner': known are embed"),
        (["--op", "sparse_decode"], "--op sparse_decode: tiny-v3 has no kernel of it here"),
        (["--memory", "0"], "--memory 0: must be above 0"),
        (["--tokens", "4", "0"], "--tokens 0: must be at least 1"),
        (["--context", "-2"], "--context -2: must be at least 1"),
        (["--context", "9999999"], "--context 9999999: tiny-v3 ends at"),
        (["--model", "demo"], "give one of both"),
        (["--seconds", "0"], "--seconds 0.0: must be above 0"),
        (
            ["--kernels", "reference.ReferenceLiner"],
            "no plugin offers it; did you mean 'reference.ReferenceLinear'?",
        ),
        (
            ["--kernels", "cpu.sample", "--op", "linear"],
            "--kernels cpu.sample: is for sample, which is not measured: name it by --op",
        ),
    ],
)
def test_wrong_flags_are_refused(capsys, monkeypatch, flags, said):
    monkeypatch.setattr(CpuPlatform, "ceilings", None)  # nothing was measured before
    assert main(["bench", "ops", "--shape", "tiny-v3", "--platform", "cpu", *flags]) != 0
    assert said in capsys.readouterr().err


def test_weights_are_those_of_a_shape(capsys):
    assert main(["bench", "ops", "--model", "demo", "--weights", "fp8", "--platform", "cpu"]) != 0
    assert "--weights fp8: is for a --shape" in capsys.readouterr().err


def test_a_shape_needs_no_checkpoint_and_leaves_nothing():
    assembly = assembled("v3-slice")
    assert assembly.plan.model == "v3-slice"
    assert not assembly.folder.exists()
    with pytest.raises(ConfigError, match="--shape"):
        config_of("none", "bfloat16")


class Slow(Platform):
    """What the default of Platform.ceilings gets."""

    name = "slow"
    info = CpuPlatform.info
    device = CpuPlatform.device
    memory = CpuPlatform.memory
    _isa = "auto"


def test_ceilings_with_torch_alone(monkeypatch, one_thread):
    monkeypatch.setattr(ceilings, "_SECONDS", 0.01)
    monkeypatch.setattr(ceilings, "_SIZES", (256,))
    monkeypatch.setattr(ceilings, "_BUFFER", 64 << 20)
    found = Slow().ceilings()
    fast = CpuPlatform().info().fast_dtypes
    assert fast <= set(found.compute) <= fast | {"int8"}
    begin = time.perf_counter()
    torch.randn(256, 256) @ torch.randn(256, 256)
    one = 2 * 256**3 / (time.perf_counter() - begin)
    assert found.compute["float32"] > one / 10
    assert found.bandwidth > 1e8


def test_the_best_call_counts():
    waits = iter([0.0, 0.02, 0.002, 0.02] + [0.01] * 1000)
    assert 0.002 <= ceilings.best(lambda: time.sleep(next(waits)), lambda: None, 0.1) < 0.0095


@pytest.mark.parametrize(
    ("cache", "free", "want"),
    [(0, 100 << 30, 2 << 30), (1 << 30, 100 << 30, 4 << 30), (0, 4 << 30, 1 << 30)],
)
def test_the_buffer_is_larger_than_the_cache(cache, free, want):
    assert ceilings.buffer_bytes(cache, free) == want


def test_neighbours(tmp_path, monkeypatch):
    import os

    tick = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"

    def write(user, idle):
        stat.write_text(f"cpu {user * tick} 0 0 {idle * tick} 0 0 0 0 0 0\n")

    own = [0.0]
    times = os.times()

    def fake():
        return type(times)((own[0], 0.0, 0.0, 0.0, 0.0))

    monkeypatch.setattr(record.os, "times", fake)
    write(10, 10)
    seen = record.Neighbours(stat)
    assert seen.share() is None  # no time has passed
    write(18, 12)
    own[0] = 5.0
    assert seen.share() == pytest.approx(0.3)
    own[0] = 20.0
    assert seen.share() == 0.0
    assert record.Neighbours(tmp_path / "none").share() is None
    assert "30%" in report.render_neighbours(0.3)
    assert report.render_neighbours(0.01) == report.render_neighbours(None) == ""
