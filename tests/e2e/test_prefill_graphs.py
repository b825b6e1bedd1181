"""Steps with prompts, captured between their attentions, on a backend that records torch ops."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from test_graphs import SETTINGS, make

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig, check_graph_sizes
from ds_runtime.config.graph_sizes import prefill_graph_sizes
from ds_runtime.engine.capture import prefill
from ds_runtime.engine.device import programs
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.errors import ConfigError, PluginError
from ds_runtime.platform.graphs import borrowed
from ds_runtime.platform.recording import CaptureError
from ds_runtime_kit.models.answers import check_float32

ON = {"disable_prefill_graph": False, "prefill_graph_sizes": (8, 24, 60)}


@pytest.fixture(scope="module")
def runner(tiny, recorded):
    made = make(tiny, recorded, **ON)
    made.warm_up()
    return made


@pytest.mark.parametrize("radix", [True, False])
def test_answers_are_those_of_eager_steps(tiny, recorded, radix):
    """Prompts in chunks, behind cached ones, beside decode steps, with log-probabilities."""
    draw = random.Random(7)
    prompts = [[draw.randrange(2, 258) for _ in range(n)] for n in (1, 33, 7, 80, 2, 16, 50, 9)]
    prompts += [prompts[3] + [9, 8, 7], prompts[3][:40]]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=i % 3 or None)
        for i in range(len(prompts))
    ]
    found = []
    for off in (True, False):
        settings = {
            **SETTINGS,
            **({} if off else ON),
            "disable_radix_cache": not radix,
        }
        with LLM(tiny, extra_plugins=[recorded], **settings) as llm:
            outputs = llm.generate(prompts[:8], params[:8]) + llm.generate(prompts[8:], params[8:])
            runner = llm._alive().runner
            replays = runner.platform.backend.replays
            pieces = 0 if off else 3 * (runner.assembly.model.layers + 1)
            assert (runner.programs.op_by_op.prefills is None) is off and all(replays[:pieces])
        found.append(outputs)
    check_float32(*found)


def steps(lengths, rows):
    """Prompts of these lengths, each from its second page on if its number is odd."""
    init, first, second = [], [], []
    for row, length in zip(rows, lengths, strict=True):
        prompt = [(row * 37 + i) % 250 + 2 for i in range(length + 16)]
        init.append(RowInit(row=row, params=SamplingParams(), seed=0, choice=0, prompt=prompt))
        pages = [row * 5 + i for i in range(5)]
        begin = 16 if row % 2 else 0
        if begin:
            work = Work(rid=str(row), row=row, start=0, length=16, pages=pages, tokens=prompt[:16])
            work.sample = False
            first.append(work)
        work = Work(rid=str(row), row=row, start=begin, length=length, pages=pages)
        work.tokens = prompt[begin : begin + length]
        second.append(work)
    plans = [StepPlan(step=i, works=works) for i, works in enumerate((first, second)) if works]
    plans[0].init = init
    return plans


@pytest.mark.parametrize("lengths", [(1,), (8,), (9,), (3, 11, 2), (24, 30), (20, 20, 20)])
def test_a_replay_changes_what_an_eager_step_changes(runner, lengths):
    """Hidden padding: spare rows write to no page, whatever step was there before."""
    rows, seen = range(1, len(lengths) + 1), {}
    for captured in (False, True):
        for cache in runner.caches:
            cache[:-1].fill_(float("nan"))
        road = runner.programs.op_by_op
        prefills, road.prefills = road.prefills, road.prefills if captured else None
        for plan in steps([60], [0]) if captured else ():  # for what it leaves
            runner.collect(runner.launch(plan))
        for cache in runner.caches:
            cache[:5].fill_(float("nan"))
        tokens = [
            [w.tokens for w in runner.collect(runner.launch(plan)).works]
            for plan in steps(lengths, rows)
        ]
        road.prefills = prefills
        seen[captured] = tokens, [c[:-1].clone() for c in runner.caches]
    assert seen[True][0] == seen[False][0]
    for got, want in zip(seen[True][1], seen[False][1], strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_fits(runner):
    sizes = [runner.programs.op_by_op.prefills.graph_for(n) for n in (0, 1, 8, 9, 24, 25, 60, 61)]
    assert [graph and graph.size for graph in sizes] == [None, 8, 8, 24, 24, 60, 60, None]


def test_sizes():
    for most, chunk, running, largest in itertools.product(
        (1, 5, 16, 300, 2048, 8192), (1, 100, 512, 8192), (1, 64), (1, 1024, 5000, 8192)
    ):
        given = {"chunked_prefill_size": chunk, "max_running_requests": running}
        config = EngineConfig(max_step_tokens=most, max_prefill_graph_size=largest, **given)
        sizes = prefill_graph_sizes(config)
        assert sizes == tuple(sorted(set(sizes)))
        assert sizes[-1] == min(most, chunk + running, largest)
        gaps = [(a, b - a) for a, b in itertools.pairwise(sizes)]
        assert all(gap <= max(32, a / 2 if a < 64 else a / 4) for a, gap in gaps)
        assert all(gap <= 192 for _, gap in gaps)
    given = EngineConfig(prefill_graph_sizes=(64, 16, 64))
    assert prefill_graph_sizes(given) == (16, 64)
    with pytest.raises(
        ConfigError, match="--prefill-graph-sizes 9,64: at most --max-step-tokens 60"
    ):
        check_graph_sizes(EngineConfig(prefill_graph_sizes=(9, 64), max_step_tokens=60))
    for off in ("disable_graph", "disable_prefill_graph"):
        with pytest.raises(ConfigError, match=f"--{off.replace('_', '-')} captures none"):
            check_graph_sizes(EngineConfig(prefill_graph_sizes=(9,), **{off: True}))
    with pytest.raises(ConfigError, match="--prefill-graph-sizes 9,64: at most"):
        assemble(EngineConfig(platform="cpu", prefill_graph_sizes=(9, 64), max_step_tokens=60))
    with pytest.raises(ConfigError, match="--prefill-graph-sizes 0: must be numbers of at least 1"):
        EngineConfig(prefill_graph_sizes=(0,))


def test_a_kernel_that_lies_about_captures_is_a_sentence(tiny, recorded, monkeypatch):
    apply = recorded.Experts.apply

    def reads(self, x, weights, ids, packed):
        assert ids.max().item() >= 0
        return apply(self, x, weights, ids, packed)

    runner = make(tiny, recorded, **ON)
    monkeypatch.setattr(recorded.Experts, "apply", reads)
    said = "a step of 60 tokens cannot be captured: .*item waits.*; --disable-prefill-graph"
    with pytest.raises(PluginError, match=said):
        runner.programs.op_by_op.prefills.capture()
    assert runner.programs.op_by_op.prefills.graph_for(5) is None, (
        "nothing is replayed that was not captured"
    )


def test_sizes_that_nobody_gave_are_captured_at_the_start(tiny, recorded):
    """And a replay leaves alone what steps of other sizes have written."""
    runner = make(tiny, recorded, disable_prefill_graph=False)
    runner.warm_up()
    backend, layers = runner.platform.backend, runner.assembly.model.layers
    assert len(runner.programs.op_by_op.prefills.sizes) == 2
    assert not runner.programs.capture_one()
    for row, length in enumerate((5, 20, 17)):
        cached = [cache.clone() for cache in runner.caches]
        for plan in steps([length], [2 * row]):
            runner.collect(runner.launch(plan))
        for cache, old in zip(runner.caches, cached, strict=True):
            own = slice(10 * row, 10 * row + 5)  # pages
            cache[own], old[own] = 0.0, 0.0
            assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))
    # What follows the last attention is not replayed for the one row that is wanted.
    prompts, decodes = backend.replays[: 2 * layers + 2], backend.replays[2 * layers + 2 :]
    assert prompts == [2] * layers + [0] + [1] * layers + [0]  # the largest first
    assert not any(decodes)


def test_captures_change_no_answer(tiny, recorded):
    """The third prompt finds what the first one cached."""
    draw = random.Random(7)
    first, other = ([draw.randrange(2, 258) for _ in range(n)] for n in (20, 5))
    params, found = SamplingParams(max_tokens=8, ignore_eos=True), []
    for off in (True, False):
        settings = {**SETTINGS, "disable_prefill_graph": off}
        with LLM(tiny, extra_plugins=[recorded], **settings) as llm:
            found.append([llm.generate([p], params)[0].token_ids for p in (first, other, first)])
    assert found[0] == found[1] and found[0][0] == found[0][2]


def test_decode_steps_take_no_graph_of_prompts(tiny, recorded):
    runner = make(tiny, recorded, disable_prefill_graph=False, graph_sizes=(1,))
    runner.warm_up()
    prompts = [plan for row in (0, 2) for plan in steps([5], [row])]
    for plan in prompts:
        runner.collect(runner.launch(plan))
    before = list(runner.platform.backend.replays)
    works = [
        Work(rid=w.rid, row=w.row, start=5, length=1, pages=w.pages)
        for plan in prompts
        for w in plan.works
    ]
    runner.collect(runner.launch(StepPlan(step=9, works=works)))
    assert runner.platform.backend.replays == before


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_what_the_start_has_no_time_for_is_captured_while_idle(tiny, recorded, monkeypatch, count):
    """The largest first, then ever closer together. A step takes the next larger one meanwhile, and
    none is captured beside it."""
    monkeypatch.setattr(prefill, "_SECONDS", 0.0)
    monkeypatch.setattr(programs, "prefill_graph_sizes", lambda config: range(3, 3 * count + 1, 3))
    runner = make(tiny, recorded, disable_prefill_graph=False)
    runner.warm_up()
    made, prefills = runner.programs, runner.programs.op_by_op.prefills
    assert prefills.sizes == ()
    (plan,) = steps([min(7, 3 * count)], [0])
    for number in range(1, count + 1):
        runner.collect(runner.launch(plan))  # another capture finds its rows filled
        cached = [cache.clone() for cache in runner.caches]
        assert made.capture_one()
        for cache, old in zip(runner.caches, cached, strict=True):
            assert torch.equal(cache[:-1].nan_to_num(7.0), old[:-1].nan_to_num(7.0))
        assert len(prefills.sizes) == number and prefills.sizes[-1] == 3 * count
        gaps = [b - a for a, b in itertools.pairwise((0, *prefills.sizes))]
        assert max(gaps) <= 3 * max(1, 4 * count // number)
        before = len(runner.platform.backend.replays)
        assert prefills.graph_for(1).size == prefills.sizes[0]
        (plan,) = steps([3], [0])
        runner.collect(runner.launch(plan))
        assert len(runner.platform.backend.replays) == before
    assert not made.capture_one() and prefills.sizes == (*range(3, 3 * count + 1, 3),)


def test_ranks_and_users_have_all_sizes_at_the_start(tiny, recorded, monkeypatch):
    monkeypatch.setattr(prefill, "_SECONDS", 0.0)
    runner = make(tiny, recorded, **ON)
    runner.warm_up()
    assert runner.programs.op_by_op.prefills.sizes == (8, 24, 60)
    assert not runner.programs.capture_one()


def test_a_size_that_cannot_be_captured_is_a_warning(tiny, recorded, monkeypatch, caplog):
    """That nobody gave. Requests are served as before, by a larger size if there is one."""
    runner = make(tiny, recorded, disable_prefill_graph=True)
    runner.warm_up()
    wanted = [served(runner, length) for length in (5, 20)]
    apply = recorded.Experts.apply
    capture, capturing = type(runner.platform.backend).capture, set()

    def captures(self, run):
        capturing.add(CaptureError)
        try:
            return capture(self, run)
        finally:
            capturing.clear()

    monkeypatch.setattr(type(runner.platform.backend), "capture", captures)
    for fails, left in (((16,), (30,)), ((16, 30), ())):

        def reads(self, x, weights, ids, packed, fails=fails):
            if CaptureError in capturing and x.shape[0] in fails:
                raise CaptureError("this kernel waits for the device")
            return apply(self, x, weights, ids, packed)

        monkeypatch.setattr(recorded.Experts, "apply", reads)
        caplog.clear()
        runner = make(tiny, recorded, disable_prefill_graph=False)
        runner.warm_up()
        assert runner.programs.op_by_op.prefills.sizes == left
        assert [served(runner, length) for length in (5, 20)] == wanted
        said = [r.getMessage() for r in caplog.records if "op by op" in r.getMessage()]
        assert len(said) == len(fails)
        for size, line in zip(reversed(fails), said, strict=True):
            assert f"a step of {size} tokens cannot be captured" in line
            assert "--disable-prefill-graph" in line


def served(runner, length):
    """The tokens of a step of one prompt."""
    (plan,) = steps([length], [0])
    return [work.tokens for work in runner.collect(runner.launch(plan)).works]


def test_captures_show_their_progress(tiny, recorded, capsys):
    make(tiny, recorded, **ON).warm_up()
    assert "capturing steps with prompts: 3 steps of 3 steps" in capsys.readouterr().err


def test_borrowed_tensors_lie_where_the_lender_does():
    x = torch.arange(60, dtype=torch.bfloat16).view(3, 20)[1:, 4:9]
    y = borrowed(x)
    assert torch.equal(x, y) and y.stride() == x.stride() and y.data_ptr() == x.data_ptr()
    x[0, 0] = -1
    assert y[0, 0] == -1
    assert borrowed(x[:0]).shape == (0, 5)
