"""Costs: what follows from measured points, and files of them."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.config.graph_sizes import graph_sizes
from ds_runtime.measured.costs import KINDS, Costs, KernelCost, Point, _packed
from ds_runtime.ops.declare import OpWork
from ds_runtime.parallel.sums.kinds import FAST
from ds_runtime.platform.contract import Ceilings
from ds_runtime.predict import step as steps
from ds_runtime.predict.calls import Step, calls, crossed
from ds_runtime_bench.ops import tune
from ds_runtime_bench.shapes import config_of
from ds_runtime_cpu.platform import CpuPlatform
from parts import mostly_slow

BANDWIDTH, RATE, FLOOR = 1e9, 1e12, 1e-6


def costs(points=(), collectives=None, **more):
    kernels = {"a.b:apply": KernelCost("linear", "bfloat16", tuple(points))} if points else {}
    base = {
        "device": "AMD EPYC",
        "arch": "x",
        "date": "2026-01-02T03:04:05Z",
        "versions": {"torch": "2"},
        "bandwidth": BANDWIDTH,
        "compute": {"bfloat16": RATE},
        "floor": FLOOR,
        "launch": 2e-6,
        "replay": 3e-6,
    }
    return Costs(**{**base, **more}, kernels=kernels, collectives=collectives or {})


def read(nbytes):
    """Work that only reads."""
    return OpWork(reads=nbytes)


def test_the_roof_is_what_takes_longer():
    made = costs()
    assert made.roof(OpWork(reads=1e9), "bfloat16") == 1.0
    assert made.roof(OpWork(reads=1e9, flops=3e12), "bfloat16") == 3.0
    assert made.roof(OpWork(flops=1e12), "int8") == 1.0  # not measured: as the slowest


def test_points_are_met_and_lie_on_lines_between():
    made = costs([Point(8, 1e6, 0, 2e-3), Point(32, 1e6, 0, 8e-3), Point(8, 3e6, 0, 5e-3)])
    at = made.seconds
    assert at("a.b:apply", 8, read(1e6)) == 2e-3
    assert at("a.b:apply", 8, read(3e6)) == 5e-3
    assert at("a.b:apply", 8, read(2e6)) == pytest.approx(3.5e-3)
    assert at("a.b:apply", 16, read(1e6)) == pytest.approx(4e-3)  # the power between 2 and 8
    # beyond the points: the floor stays, the rest grows with the roof
    assert at("a.b:apply", 8, read(6e6)) == pytest.approx(FLOOR + (5e-3 - FLOOR) * 2)
    assert at("a.b:apply", 8, read(5e5)) == pytest.approx(FLOOR + (2e-3 - FLOOR) / 2)
    more = at("a.b:apply", 64, read(2e6))
    assert more == pytest.approx(FLOOR + (8e-3 - FLOOR) * 2)
    with pytest.raises(KeyError):
        at("a.c:apply", 8, read(1))


sizes = st.floats(1, 1e12)
times = st.floats(1e-8, 1e3)
point = st.builds(Point, st.integers(1, 9000), sizes, sizes, times)


@given(st.lists(point, min_size=1, max_size=12), st.integers(1, 20000), sizes, sizes)
def test_any_points_give_a_time_between_or_beyond_them(points, rows, nbytes, flops):
    made = costs(points)
    assert 0 < made.seconds("a.b:apply", rows, OpWork(reads=nbytes, flops=flops)) < math.inf
    one_place = list({p.rows: p for p in sorted(points, key=lambda p: p.rows)}.values())
    made = costs(one_place)
    for p in one_place:
        work = OpWork(reads=p.nbytes, flops=p.flops)
        assert made.seconds("a.b:apply", p.rows, work) == p.seconds


def test_experts_follow_rows_that_meet_a_weight_not_rows():
    """Four times as many experts, for four times as many rows, read four times as much at the same
    rate; at as many rows they would be taken for those of a call that multiplies more."""
    few = []
    for n in (1, 8, 32, 128):
        reached = min(n, 8)  # experts, which take as long until each meets many rows
        few.append(Point(n, 1e6 * reached, 2e6 * n, 1e-3 * reached * (3 if n > 32 else 1)))
    made = costs(few)
    made = Costs(
        **{**_fields(made), "kernels": {"a.b:apply": KernelCost("experts", "bfloat16", tuple(few))}}
    )
    for p in few:
        work = OpWork(reads=4 * p.nbytes, flops=4 * p.flops)
        got = made.seconds("a.b:apply", 4 * p.rows, work)
        assert got == pytest.approx(4 * p.seconds, rel=0.01)


@given(st.lists(point, min_size=1, max_size=9))
def test_a_file_says_what_was_measured(points):
    curves = {"all_reduce": {2: ((4096, 1e-5), (8192, 2e-5))}}
    made = costs(points, curves)
    text = json.dumps(_raw(made))
    back = Costs.parse(text)
    assert back.collectives == curves and back.compute == made.compute
    for old, new in zip(points, back.kernels["a.b:apply"].points, strict=True):
        assert (new.rows, new.nbytes, new.flops) == (old.rows, old.nbytes, old.flops)
        assert new.seconds == pytest.approx(old.seconds, rel=1e-3)


def _raw(made):
    return _packed(made)


def test_collectives_of_other_ranks_receive_as_much():
    made = costs(collectives={"all_reduce": {2: ((1 << 12, 1e-5), (1 << 20, 2e-5))}})
    assert made.collective("all_reduce", 2, 1 << 20) == 2e-5
    assert made.collective("all_reduce", 2, 1 << 11) == pytest.approx(1e-5)  # latency is all
    middle = made.collective("all_reduce", 2, ((1 << 12) + (1 << 20)) / 2)
    assert middle == pytest.approx(1.5e-5)
    # 8 ranks receive 7/8 of the whole, as 2 do of 1.75 times as much
    assert made.collective("all_reduce", 8, 2**20 / 1.75) == pytest.approx(2e-5)
    both = made.with_collectives({"all_reduce": {4: ((1 << 12, 5e-5),)}})
    assert set(both.collectives["all_reduce"]) == {2, 4}
    with pytest.raises(KeyError):
        made.collective("all_gather", 2, 1)


SETTINGS = {"platform": "cpu", "load_format": "dummy", "threads": 1, "kv_memory": 8_000_000}


def decided(folder, **more):
    settings = {**SETTINGS, "model": str(folder), **more}
    return assemble(EngineConfig(**settings), set(settings))


def written(tmp_path, **changes):
    folder = tmp_path / "model"
    folder.mkdir()
    config = config_of("tiny-v3", "bfloat16") | {"num_nextn_predict_layers": 0} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def priced(assembly, step, each):
    """Costs in which a call of every kernel takes `each` seconds, and a collective twice that."""
    found = {}
    for call in calls(assembly, step):
        found.setdefault(call.name, set()).add(_point(call, each))
    points = {name: KernelCost("", "bfloat16", tuple(of)) for name, of in found.items()}
    curves = {kind: {2: ((1, 2 * each), (1 << 40, 2 * each))} for kind in KINDS}
    made = costs(collectives=curves, device=assembly.device.name)
    return Costs(**{**_fields(made), "kernels": points})


def _point(call, seconds):
    work = call.work(call.rows)
    return Point(call.rows, work.nbytes, work.flops, seconds)


def _fields(made):
    return {name: getattr(made, name) for name in made.__slots__}


@pytest.mark.parametrize(
    "mesh", [{}, {"tp": 2}, {"tp": 2, "ep": 2, "enable_dp_attention": True, "dp": 2}]
)
def test_a_step_is_the_sum_of_its_calls(tmp_path, mesh):
    assembly = decided(written(tmp_path), disable_graph=True, **mesh)
    step = Step("decode", 8, 8, 32)
    made = priced(assembly, step, 1.0)
    found = steps.predict(assembly, made, step)
    count = sum(call.count for call in calls(assembly, step))
    moves = sum(one.count for one in crossed(assembly, step))
    assert found.seconds == pytest.approx(count + 2 * moves)
    assert found.by.get(steps.COLLECTIVES, 0) == pytest.approx(2 * moves)
    assert not found.unmeasured
    assert (found.nbytes > 0) == bool(mesh)


def test_costs_without_small_sums_count_them_as_the_librarys(tmp_path):
    """The file of a device has sizes for them, and the one that is asked was made before."""
    given = {"tp": 2, "model": str(written(tmp_path)), "dtype": "bfloat16", "disable_graph": True}
    step = Step("decode", 8, 8, 32)
    assembly = assemble(EngineConfig(**given), set(given), device="h200")
    assert {one.kind for one in crossed(assembly, step)} & set(FAST)
    library = assemble(
        EngineConfig(**given, disable_custom_all_reduce=True), set(given), device="h200"
    )
    curve = {2: ((1, 1e-3), (1 << 40, 1e-3))}
    older = costs(collectives={kind: curve for kind in KINDS if kind not in FAST})
    found, same = (steps.predict(one, older, step) for one in (assembly, library))
    assert found.by[steps.COLLECTIVES] == same.by[steps.COLLECTIVES] >= 1e-3
    assert not any(name.endswith("between ranks") for name in found.unmeasured)
    said = "one-shot and two-shot sums were not measured, counted as the library's"
    assert said in steps.notes(assembly, older, [found])
    assert said not in steps.notes(library, older, [same])


def test_what_was_not_measured_is_named_and_takes_its_roof(tmp_path):
    assembly = decided(written(tmp_path), disable_graph=True, tp=2)
    step = Step("decode", 8, 8, 32)
    found = steps.predict(assembly, costs(), step)
    names = {call.kernel.name for call in calls(assembly, step)}
    assert found.unmeasured == names | {
        f"{one.kind} between ranks" for one in crossed(assembly, step)
    }
    assert found.seconds >= FLOOR * sum(call.count for call in calls(assembly, step))


def test_plan_tells_steps_and_refuses_costs_of_another_device(tmp_path, capsys):
    folder = written(tmp_path)
    path = tmp_path / "costs.json"
    plan = ["plan", "--model", str(folder), "--platform", "cpu", "--costs", str(path)]
    costs([Point(1, 1, 1, 1)], device="another").write(path)
    assert main(plan) == 1
    assert "holds costs of another" in capsys.readouterr().err
    costs([Point(1, 1, 1, 1)], device=decided(folder).device.name).write(path)
    assert main([*plan, "--cached-tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert "decode step, by requests with 64 cached tokens each: 1: " in out
    assert "prefill of 512 tokens" in out and "not measured" in out
    assert main([*plan, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not any("decode step" in line for line in told["memory"])
    for one in told["predicted"]["steps"]:
        assert one["seconds"] == pytest.approx(sum(one["parts_seconds"].values()))
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
        assert one["not_measured"] and one["received_bytes"] == 0
    said = told["predicted"]["notes"]
    assert any("run ds-runtime tune host" in note for note in said)
    assert not any(note in told["memory"] for note in said)
    assert main([*plan, "--cached-tokens", "0"]) == 1
    assert "--cached-tokens 0" in capsys.readouterr().err


@pytest.mark.parametrize("positions", [64, 2048])
def test_cached_tokens_are_of_the_models_context(tmp_path, capsys, positions):
    folder = written(tmp_path, max_position_embeddings=positions)
    path = tmp_path / "costs.json"
    costs([Point(1, 1, 1, 1)], device=decided(folder).device.name).write(path)
    plan = ["plan", "--model", str(folder), "--platform", "cpu", "--costs", str(path)]
    assert main(plan) == 0
    wanted = min(512, positions - 1)
    assert f"decode step, by requests with {wanted} cached tokens" in capsys.readouterr().out
    assert main([*plan, "--cached-tokens", str(positions)]) == 0
    capsys.readouterr()
    assert main([*plan, "--cached-tokens", str(positions + 1)]) == 1
    said = capsys.readouterr().err
    assert f"--cached-tokens {positions + 1}: this model's context has {positions} tokens" in said


def test_a_plan_of_v3_on_eight_ranks_tells_memory_wire_and_steps(tmp_path, capsys):
    model = Path(__file__).parents[1] / "model/fixtures/deepseek-v3.json"
    (tmp_path / "config.json").write_text(model.read_text())
    curves = {kind: {2: ((4096, 1e-5), (1 << 26, 4e-4))} for kind in KINDS}
    made = costs([Point(1, 1, 1, 1e-6)], curves, device="NVIDIA H200")
    path = tmp_path / "costs.json"
    Costs(**{**_fields(made), "bandwidth": 4e12, "compute": {"float8_e4m3fn": 1e15}}).write(path)
    plan = ["plan", "--model", str(tmp_path), "--device", "h200", "--costs", str(path)]
    assert main([*plan, "--tp", "8", "--dp", "8", "--ep", "8", "--enable-dp-attention"]) == 0
    out = capsys.readouterr().out
    assert "of each rank: weights" in out and "that each rank receives" in out
    steps_said = re.search(r"decode step, by requests .*?: (.*)", out)[1]
    found = {int(n): float(ms) for n, ms in re.findall(r"(\d+): ([\d.]+) ms", steps_said)}
    assert list(found) == list(steps.BATCHES)
    assert list(found.values()) == sorted(found.values())
    assert "collectives were measured with 2 ranks" in out
    # every expert of a rank once, for 512 requests, is the least that a step reads
    assert found[512] > 58 * 32 * 3 * 7168 * 2048 / 4e12 * 1e3


HOST = ((1, 1e-3), (64, 3e-3), (512, 20e-3))


@given(st.integers(1, 4096))
def test_the_engines_own_work_grows_with_requests(requests):
    made = costs(host=HOST)
    found = made.on_the_host(requests)
    assert found <= made.on_the_host(requests + 1) and costs().on_the_host(requests) == 0
    if requests > 512:
        assert found == pytest.approx(20e-3 * requests / 512)
    assert made.on_the_host(64) == 3e-3 and made.on_the_host(288) == pytest.approx(11.5e-3)


@pytest.mark.parametrize("queues", [True, False])
def test_a_device_waits_for_the_host_where_it_is_slower(tmp_path, monkeypatch, queues):
    """One that queues computes meanwhile; any other does nothing else."""
    assembly = decided(written(tmp_path))
    monkeypatch.setattr(type(assembly.platform), "asynchronous", queues)
    slow = costs(launch=1e-9, host=((1, 1.0), (512, 1.0)))
    plain = steps.predict(assembly, costs(launch=1e-9), steps.decode(8, 64))
    found = steps.predict(assembly, slow, steps.decode(8, 64))
    assert steps.HOST not in plain.by
    assert found.seconds == pytest.approx(1.0 + (0 if queues else plain.seconds), rel=1e-3)
    fast = costs(launch=1e-9, host=((1, 1e-12), (512, 1e-12)))
    assert steps.predict(assembly, fast, steps.decode(8, 64)).seconds == pytest.approx(
        plain.seconds
    )


@pytest.mark.parametrize(
    ("queues", "overlap"),
    mostly_slow([(True, False), (True, True), (False, False), (False, True)], 1),
)
@given(own=st.floats(1e-4, 0.1), queue=st.sampled_from([1e-9, 1e-4, 0.5]))
def test_without_overlap_the_engines_own_work_is_always_waited_for(
    tmp_path_factory, queues, overlap, own, queue
):
    """With it, a device that queues computes meanwhile."""
    assembly = decided(folder_of(tmp_path_factory), disable_overlap_schedule=not overlap)
    step = steps.decode(8, 64)
    known = {"host": ((1, own), (512, own)), "launch": 1e-9}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(assembly.platform), "asynchronous", queues)
        patch.setattr(type(assembly.platform), "captures", False)
        made = every_call(assembly, step, queue=queue)
        found = steps.predict(assembly, Costs(**{**_fields(made), **known}), step)
        patch.setattr(type(assembly.platform), "asynchronous", False)
        device = steps.predict(assembly, made, step).seconds
    queued = queue * sum(call.count for call in calls(assembly, step))
    if not queues:
        wanted = own + device
    elif overlap:
        wanted = max(own + queued, device)
    else:
        wanted = own + max(queued, device)
    assert found.seconds == pytest.approx(wanted, rel=1e-6)
    assert found.seconds == pytest.approx(sum(found.by.values()))


def folder_of(factory):
    """One model for all examples of a test."""
    at = factory.getbasetemp() / "one"
    return at / "model" if at.exists() else (at.mkdir(), written(at))[1]


CAPTURED = {"graph_sizes": (2, 4)}, {"max_graph_size": 4}, {}


@pytest.mark.parametrize("after", [0, 8], ids=["at start", "when needed"])
@pytest.mark.parametrize("flags", CAPTURED, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_is_captured_where_a_recording_has_its_rows(
    tmp_path, monkeypatch, flags, after, groups
):
    """One that is captured when it is needed has no spare rows; none has more than the largest."""
    monkeypatch.setattr(CpuPlatform, "captures", True)
    monkeypatch.setattr(CpuPlatform, "capture_after", after)
    mesh = {"tp": 2, "dp": 2, "enable_dp_attention": True} if groups == 2 else {}
    settings = {"max_running_requests": 80 * groups, **mesh}
    assembly = decided(folder := written(tmp_path), **settings, **flags)
    plain = decided(folder, **settings, disable_graph=True)
    made = costs(replay=5.0)

    def seconds(of, rows):
        found = steps.predict(of, made, steps.decode(rows * groups, 64))
        return {op: one for op, one in found.by.items() if op != steps.REPLAY}, found

    for rows, padded in ((1, 2 if "graph_sizes" in flags else 1), (3, 4), (4, 4)):
        by, found = seconds(assembly, rows)
        assert found.by[steps.REPLAY] == 5.0
        own = after > 0 and "graph_sizes" not in flags
        assert by == pytest.approx(seconds(plain, rows if own else padded)[0])
    most = graph_sizes(assembly.config, after > 0)[-1]
    assert most == 4 if flags else most == 32 if after else most >= 80
    assert steps.REPLAY in seconds(assembly, most)[1].by
    for rows in (most + 1, 2 * most, 100 * most):
        by, found = seconds(assembly, rows)
        assert steps.REPLAY not in found.by and by == seconds(plain, rows)[0]


def every_call(assembly, step, **more):
    """Costs in which all calls of a step are measured."""
    one = Point(512, 1e3, 1e9, 1e-3)
    kernels = {c.name: KernelCost(c.op, "bfloat16", (one,), **more) for c in calls(assembly, step)}
    return Costs(**{**_fields(costs()), "kernels": kernels})


def test_calls_are_queued_as_long_as_was_measured(tmp_path, monkeypatch):
    assembly = decided(written(tmp_path), disable_graph=True)
    monkeypatch.setattr(type(assembly.platform), "asynchronous", True)
    step = steps.decode(8, 64)
    count = sum(call.count for call in calls(assembly, step))
    found = steps.predict(assembly, every_call(assembly, step, queue=2.0), step)
    assert found.seconds == pytest.approx(2.0 * count) and not found.unqueued
    found = steps.predict(assembly, every_call(assembly, step), step)
    assert {c.kernel.name for c in calls(assembly, step)} == found.unqueued


def test_prompts_take_as_long_as_under_lasting_load(tmp_path):
    """Of calls that multiply at a high rate; decode steps and other calls stay as they are."""
    assembly = decided(written(tmp_path))
    prompts, step = steps.prefill(512, 512), steps.decode(8, 64)
    for one in (prompts, step):
        plain, slow = (
            # Memory is so fast that the arithmetic of this small model is what takes time.
            replace(every_call(assembly, one, lasting=times), bandwidth=1e3 * BANDWIDTH)
            for times in (None, 3.0)
        )
        before, found = (steps.predict(assembly, made, one) for made in (plain, slow))
        assert not found.unlasting
        busy = {
            call.op
            for call in calls(assembly, one)
            if plain.multiplies(
                work := call.work(call.rows),
                "bfloat16",
                plain.seconds(call.name, call.rows, work),
            )
        }
        assert bool(before.unlasting) == (one is prompts)
        for op in found.by:
            times = 3.0 if one is prompts and op in busy else 1.0
            assert found.by[op] <= before.by[op] * times * (1 + 1e-9), op
            assert times == 1.0 or found.by[op] > before.by[op], op


def test_a_call_far_above_all_measured_rows_is_called_a_guess(tmp_path):
    assembly = decided(written(tmp_path))
    few = steps.decode(8, 64)
    made = every_call(assembly, few)  # of 512 rows
    assert not steps.predict(assembly, made, steps.decode(1024, 64)).far
    assert "reference" not in "".join(steps.predict(assembly, made, few).far)
    assert steps.predict(assembly, made, steps.decode(4096, 64)).far


def test_drafts_are_said_to_be_left_out(tmp_path, capsys):
    folder = written(tmp_path, num_nextn_predict_layers=1)
    path = tmp_path / "costs.json"
    costs([Point(1, 1, 1, 1)], device=decided(folder).device.name).write(path)
    plan = ["plan", "--model", str(folder), "--platform", "cpu", "--costs", str(path)]
    assert main(plan) == 0
    assert "are left out" not in capsys.readouterr().out
    assert main([*plan, "--speculative-algorithm", "NEXTN"]) == 0
    assert "drafts (NEXTN) are left out: these are steps of one token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["host", "--requests", "0"], "--requests 0"),
        (["host", "--out", "/nowhere/costs.json"], "cannot be read"),
        (["costs", "--seconds", "0"], "--seconds 0"),
        (["costs", "--rows", "0"], "--rows 0"),
        (["costs", "--op", "nothing"], "nothing"),
        (["comm", "--ranks", "1"], "--ranks 1"),
        (["comm", "--out", "/nowhere/costs.json"], "cannot be read"),
    ],
)
def test_bad_input_of_tune_is_named(capsys, flags, said):
    assert main(["tune", *flags, "--platform", "cpu"]) == 1
    assert said in capsys.readouterr().err


def test_on_a_device_that_queues_the_host_and_lasting_load_are_measured(tmp_path, monkeypatch):
    """The processor, taken for such a device: of busy calls at the most rows, and of no other."""
    given = Ceilings(1e12, {"bfloat16": 1e6, "float32": 1e30}, 1 << 25, "given")
    monkeypatch.setattr(CpuPlatform, "ceilings", lambda self, rank=0: given)
    monkeypatch.setattr(CpuPlatform, "asynchronous", True)
    monkeypatch.setattr(CpuPlatform, "captures", False)
    monkeypatch.setattr(tune, "LASTING", 0.02)
    told = []
    tuning = tune.Tuning(1e-3, (1, 4), told.append)
    config, geometry = EngineConfig(platform="cpu", threads=1), tune.Geometry("tiny-v3")
    assembly = tune.assembled(config, {"platform", "threads"}, geometry, "bfloat16")
    tuning.add(assembly, ("linear", "router_logits"))
    tuning.costs().write(path := tmp_path / "costs.json")
    made = Costs.read(path).kernels
    assert made, told
    for name, cost in made.items():
        assert cost.queue > 0, name
        assert (cost.lasting is not None) == (cost.arithmetic == "bfloat16"), name
        assert cost.lasting is None or cost.lasting >= 1, name


@pytest.mark.slow
def test_tuned_on_this_machine_a_step_is_predicted(tmp_path, monkeypatch):
    """Costs of ops at other sizes, and a step that was not among them: within a wide bound. Times
    are those of the processor, as others use the machine, too."""
    given = Ceilings(2e10, {"bfloat16": 2e11, "float32": 1e11}, 1 << 25, "given")
    monkeypatch.setattr(CpuPlatform, "ceilings", lambda self, rank=0: given)
    values = {"n_routed_experts": 8, "num_experts_per_tok": 4, "vocab_size": 16384}
    values |= {"intermediate_size": 4096}
    tuning = tune.Tuning(1e-2, (1, 4, 16), lambda said: None)
    config = EngineConfig(platform="cpu", threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", time.process_time)
        for change in (
            {"moe_intermediate_size": 704},
            {"n_routed_experts": 16, "vocab_size": 4096},
        ):
            geometry = tune.Geometry("lite-2", values | change)
            tuning.add(tune.assembled(config, {"platform", "threads"}, geometry, "bfloat16"))
        path = tmp_path / "costs.json"
        tuning.costs().write(path)
    made = Costs.read(path)

    folder = tmp_path / "model"
    folder.mkdir()
    config = config_of("lite-8", "bfloat16") | values | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"disable_radix_cache": True, "context_length": 256, "kv_memory": 32 << 20}
    settings = {**SETTINGS, **settings}
    assembly = decided(folder, **settings)
    with LLM(str(folder), **settings) as llm:
        for requests in (1, 8):
            prompts = [[1 + i] * 16 for i in range(requests)]
            took = []
            for _ in range(3):
                times = []
                for tokens in (4, 20):
                    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
                    start = time.process_time()
                    llm.generate(prompts, params)
                    times.append(time.process_time() - start)
                took.append((times[1] - times[0]) / 16)
            predicted = steps.predict(assembly, made, steps.decode(requests, 28))
            assert not predicted.unmeasured
            measured = sorted(took)[1]
            print(f"{requests}: {predicted.seconds * 1e3:.2f} ms, measured {measured * 1e3:.2f} ms")
            assert measured / 3 < predicted.seconds < 3 * measured
