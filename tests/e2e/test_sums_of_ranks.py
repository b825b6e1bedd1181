"""Ranks that are processes sum by size: as measured on them, and with the library's answers."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.engine.banner import banner
from ds_runtime.measured import found
from ds_runtime.measured.costs import KINDS, Costs, KernelCost, Point
from ds_runtime.measured.sums import of
from ds_runtime_bench.ops import comm
from parts import mostly_slow

SETTINGS = {
    "platform": "sharing",
    "dtype": "float32",
    "kv_memory": "2MB",
    "threads": 1,
    "tp": 2,
    "disable_graph": True,
}
COUNTED = []  # stats before the answers, and behind them
SIZES = [256, 512, 1024, 2048, 4096]  # a row of the model has 256 bytes


@pytest.fixture
def sharing(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))
    import sharing

    yield sharing
    del sys.modules["sharing"]


def costs(device, one_shot, two_shot):
    kernels = {"a.b:apply": KernelCost("linear", "float32", (Point(1, 1, 1, 1),))}
    curves = {
        "all_reduce": {2: tuple((n, 3e-5) for n in SIZES)},
        "one_shot": {2: tuple((n, 1e-5 if n <= one_shot else 9e-5) for n in SIZES)},
        "two_shot": {2: tuple((n, 2e-5 if n <= two_shot else 9e-5) for n in SIZES)},
    }
    rates = (1e9, {"float32": 1e12}, 1.0, 1.0, 1.0)
    return Costs(device, "x", "2026-01-02", {}, *rates, kernels, curves)


def answers(folder, sharing, **more):
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
    prompts = [[3 + i, 5, 7 + i] * (1 + 4 * i) for i in range(3)]
    with LLM(folder, extra_plugins=[sharing], **{**SETTINGS, **more}) as llm:
        before = llm.stats()
        found = llm.generate(prompts, params)
        COUNTED[:] = before, llm.stats()
        return [(one.token_ids, one.logprobs) for one in found], llm._assembly.sums


def test_answers_are_the_librarys_and_every_kind_serves(tiny, sharing, tmp_path, monkeypatch):
    costs(device(sharing), 512, 2048).write(found.own(device(sharing)))
    plain, none = answers(str(tiny), sharing, disable_custom_all_reduce=True)
    assert not none.sizes.upto
    assert {*COUNTED[1].sums} == {"all_reduce"}
    monkeypatch.setenv("SUMS_NOTED", str(tmp_path / "noted"))
    own, sums = answers(str(tiny), sharing)
    assert sums.sizes.upto == (("one_shot", 512), ("two_shot", 2048))
    assert own == plain, "sums of two parts have the same bits in any order"
    noted = [(tmp_path / f"noted.{rank}").read_text().split("\n") for rank in range(2)]
    assert noted[0] == noted[1]
    served = [line.split() for line in noted[0] if line]
    assert {kind for kind, _ in served} == {"one_shot", "two_shot", "all_reduce"}
    for kind, size in served:
        assert kind == sums.sizes.kind(int(size))
    check_counted(served)


def test_small_sums_are_one_call_with_the_norm_behind_them(tiny, sharing, tmp_path, monkeypatch):
    """The answers are those of two calls, to the bit; what is not normed is summed as before."""
    costs(device(sharing), 512, 2048).write(found.own(device(sharing)))
    more = {"dtype": "bfloat16"}
    plain, none = answers(str(tiny), sharing, disable_custom_all_reduce=True, **more)
    assert not none.normed
    monkeypatch.setenv("SUMS_NOTED", str(tmp_path / "noted"))
    own, sums = answers(str(tiny), sharing, **more)
    assert sums.normed and own == plain
    noted = [(tmp_path / f"noted.{rank}").read_text().split("\n") for rank in range(2)]
    assert noted[0] == noted[1]
    served = [line.split() for line in noted[0] if line]
    for kind, size in served:
        want = sums.sizes.kind(int(size))
        assert kind == want or (kind, want) == ("normed", "one_shot")
    kinds = Counter(kind for kind, _ in served)
    # Of a step's sums only that of the embedding has no norm behind it.
    assert kinds["normed"] > 4 * kinds["one_shot"] > 0
    check_counted([("one_shot" if kind == "normed" else kind, size) for kind, size in served])


def test_a_half_computes_while_sums_of_the_other_travel(tiny, sharing, tmp_path, monkeypatch):
    """Of each layer both halves' sums of attention are started before the first is waited for."""
    monkeypatch.setenv("SUMS_NOTED", str(tmp_path / "noted"))
    own = {"enable_two_batch_overlap": True, "dbo_prefill_token_threshold": 8}
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    with LLM(str(tiny), extra_plugins=[sharing], **SETTINGS, **own) as llm:
        before = llm.stats()
        llm.generate([[3 + n for n in range(40)], [4 + n for n in range(40)]], params)
        after = llm.stats()
        layers = llm._assembly.model.layers
    noted = [(tmp_path / f"noted.{rank}").read_text().split("\n") for rank in range(2)]
    assert noted[0] == noted[1]
    calls = [line.split() for line in noted[0] if line]
    kinds = "".join({"start": "s", "end": "e"}.get(kind, "") for kind, _ in calls)
    # One of each half is under way, and whoever starts the next has waited for its own.
    assert kinds == "ss" + "es" * (4 * layers - 2) + "ee"
    grown = {kind: n - before.sums.get(kind, 0) for kind, n in after.sums.items()}
    assert grown == {"all_reduce_async": 4 * layers, "all_reduce": 2}


@pytest.mark.parametrize("lacked", mostly_slow([False, True], 1))
def test_few_logits_are_gathered_by_one_kernel(tiny, sharing, tmp_path, monkeypatch, lacked):
    """Up to the measured size, with the library's answers to the bit; captured steps, too."""
    own = costs(device(sharing), 512, 2048)
    most = 1 << 11  # bytes, of which four rows of the tiny vocabulary are more
    curves = {
        "gather_logits": {2: tuple((n, 1e-5 if n <= most else 9e-5) for n in SIZES)},
        "all_gather": {2: tuple((n, 2e-5) for n in SIZES)},
    }
    own.with_collectives(curves).write(found.own(device(sharing)))
    more = {"dtype": "bfloat16"}
    plain, none = answers(str(tiny), sharing, disable_custom_all_reduce=True, **more)
    assert none.gathered == 0
    monkeypatch.setenv("SUMS_NOTED", str(tmp_path / "noted"))
    if lacked:
        monkeypatch.setenv("GATHER_LACKED", "1")
    own, sums = answers(str(tiny), sharing, **more)
    assert own == plain and sums.gathered == (0 if lacked else most)
    noted = [(tmp_path / f"noted.{rank}").read_text().split("\n") for rank in range(2)]
    assert noted[0] == noted[1]
    sizes = {int(line.split()[1]) for line in noted[0] if line.startswith("gather_logits")}
    assert bool(sizes) != lacked and all(2 * size <= most for size in sizes)


@pytest.mark.parametrize(
    ("lacked", "left"),
    [
        pytest.param("1 one_shot two_shot", (), marks=pytest.mark.slow),
        pytest.param("0 one_shot two_shot", (), marks=pytest.mark.slow),
        ("1 one_shot", (("two_shot", 2048),)),
        pytest.param("0 two_shot", (("one_shot", 512),), marks=pytest.mark.slow),
    ],
)
def test_a_kind_that_one_rank_cannot_set_up_serves_none(
    tiny, sharing, tmp_path, monkeypatch, lacked, left
):
    """Answers are the library's, and the plan and the counters name what serves."""
    costs(device(sharing), 512, 2048).write(found.own(device(sharing)))
    plain, _ = answers(str(tiny), sharing, disable_custom_all_reduce=True)
    monkeypatch.setenv("SUMS_LACKED", lacked)
    monkeypatch.setenv("SUMS_NOTED", str(tmp_path / "noted"))
    own, sums = answers(str(tiny), sharing, dist_timeout=60)
    assert own == plain
    assert sums.sizes.upto == left and "could not set it up" in sums.said
    noted = [(tmp_path / f"noted.{rank}").read_text().split("\n") for rank in range(2)]
    assert noted[0] == noted[1]
    served = [line.split() for line in noted[0] if line]
    assert all(kind == sums.sizes.kind(int(size)) for kind, size in served)
    assert {kind for kind, _ in served} == {"all_reduce", *dict(left)}
    check_counted(served)
    assert "all_reduce" in COUNTED[1].sums  # small ones may be of warming alone
    assert {*COUNTED[1].sums} <= {"all_reduce", *dict(left)}


@pytest.mark.parametrize("lacked", [False, True])
def test_a_kernel_that_adds_in_order_is_named_where_it_serves(
    tiny, sharing, tmp_path, monkeypatch, lacked
):
    """The plan that the server shows, its start and its bytes."""
    monkeypatch.setenv("SUMS_NOTED", str(tmp_path / "noted"))
    if lacked:
        monkeypatch.setenv("ORDER_LACKED", "1")
    own = {**SETTINGS, "batch_invariant": True}
    with LLM(str(tiny), extra_plugins=[sharing], **own) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
        assembly, said = llm._assembly, banner(llm._assembly, llm._engine.runner)
    assert (tmp_path / "noted.1").exists() != lacked, "what ranks call says which serves"
    one_kernel = "sums of fewer than 262144 values are one kernel, which adds ranks in order"
    lost = "all-reduces of few values have no kernel of their own: ranks could not set it up: the "
    lost += "log says why"
    served, unserved = (lost, one_kernel) if lacked else (one_kernel, lost)
    shown = json.dumps(assembly.plan.to_dict(), default=list)
    assert served in shown and unserved not in shown
    assert f"sums      {served}" in said and unserved not in said
    assert Crossing.of(assembly).at_once != lacked


def check_counted(served):
    """Counters say what ranks noted: the last of it, as engines sum before they answer, too. The
    last FFN of a step with prompts has only the rows that are wanted, and counts as the others.
    """
    before, after = COUNTED
    grown = {kind: n - before.sums.get(kind, 0) for kind, n in after.sums.items()}
    total, prompts = sum(grown.values()), after.prefill_steps - before.prefill_steps
    assert prompts > 0 and 0 < total <= len(served)
    last = served[len(served) - total :]
    noted = Counter(kind for kind, _ in last)
    assert all(abs(grown.get(kind, 0) - noted[kind]) <= prompts for kind in {*grown, *noted})
    counted = sum(after.sum_bytes.values()) - sum(before.sum_bytes.values())
    sizes = [int(size) for _, size in last]  # which are what a rank receives of two
    assert 0 <= counted - sum(sizes) <= prompts * max(sizes)
    assert sum(after.sum_bytes.values()) < after.wire_bytes


def device(sharing):
    return sharing.SharingPlatform().info().name


def test_a_file_that_no_rank_can_read_is_named(tiny, sharing):
    path = found.own(device(sharing))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(Exception, match=str(path)):
        answers(str(tiny), sharing)


def test_tune_comm_measures_every_kind(sharing):
    measured = comm.measure(sharing.SharingPlatform(), 2, (4096, 8192, 16384))
    assert {*measured} == {*KINDS}
    for curves in measured.values():
        assert [size for size, _ in curves[2]] == [4096, 8192, 16384]
    made = costs("x", 0, 0).with_collectives(measured)
    sizes = of(made, 2)
    assert sizes is not None and sizes.most <= 16384
