"""Captured decode steps, on a backend that records torch ops: capture, new inputs, replay."""

from __future__ import annotations

import itertools
import random
import re
from contextlib import contextmanager

import pytest
import torch

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig, check_graph_sizes
from ds_runtime.config.graph_sizes import graph_sizes
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.errors import ConfigError, PluginError
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.parallel.world import World
from ds_runtime.platform.recording import CaptureError
from ds_runtime_kit.checks.conformance import check_kernel, facts_for
from ds_runtime_kit.checks.replay import ReplayBackend
from parts import mostly_slow

SETTINGS = {
    "platform": "recorded",
    "plugins": (),  # no kernel that is not in torch: the recorder sees torch ops
    "dtype": "float32",
    "kv_memory": 1_500_000,
    "threads": 1,
    "max_running_requests": 6,
    "chunked_prefill_size": 24,
    "max_step_tokens": 60,
    "disable_prefill_graph": True,  # test_prefill_graphs.py
}


@contextmanager
def in_earnest(bound):
    """A rehearsal whose kernels run."""
    yield True


def set_up(recorded, monkeypatch, how):
    """How steps are captured: see test_answers_are_those_of_eager_steps."""
    monkeypatch.setattr(recorded.MlaDecode, "prepares_on_device", how != "prepared in front")
    if how == "rehearsed":
        monkeypatch.setattr("ds_runtime.engine.device.runner.rehearsing", in_earnest)


def make(tiny, recorded, poison=True, **settings):
    config = EngineConfig(model=str(tiny), **{**SETTINGS, **settings})
    return Runner(assemble(config, SETTINGS, [recorded]), World.alone(), poison=poison)


@pytest.fixture(scope="module")
def runner(tiny, recorded):
    made = make(tiny, recorded)
    made.warm_up()
    return made


@pytest.mark.parametrize(
    "op",
    [
        *("cache_write", "cache_move", "mla_decode", "index_prologue", "index_scores"),
        *("experts", "sample", "logprobs"),
    ],
)
def test_the_kernels_of_these_tests_conform(recorded, op):
    facts = facts_for(DeviceInfo("cpu", "host", "any"), "float32")
    offers = [*recorded.ds_attention(facts), *recorded.ds_moe(facts), *recorded.ds_ops(facts)]
    (kernel,) = (k for k in offers if k.op.name == op)
    results = check_kernel(kernel, facts)
    assert len(results) > 1 and [r.failure for r in results if not r.ok] == []


@pytest.mark.parametrize(
    "how", mostly_slow(["prepared inside", "rehearsed", "prepared in front"], 2)
)
def test_answers_are_those_of_eager_steps(tiny, recorded, monkeypatch, how):
    """MLA decode prepares within the recording, or in front of every replay; a rehearsal, in which
    these kernels do run, leaves nothing.
    """
    set_up(recorded, monkeypatch, how)
    draw = random.Random(5)
    prompts = [
        [draw.randrange(2, 258) for _ in range(n)] for n in (1, 33, 7, 80, 2, 16, 15, 50, 9, 4)
    ]
    params = [
        SamplingParams(max_tokens=n, **extra)
        for n, extra in zip(
            (30, 12, 1, 40, 25, 9, 70, 33, 80, 40),
            (
                {},
                {"temperature": 0.7, "seed": 3},
                {"logprobs": 2},
                {"logprobs": 1},
                {"frequency_penalty": 0.8},
                {"min_tokens": 5, "stop_token_ids": tuple(range(2, 99))},
                {"temperature": 1.0, "top_p": 0.9, "seed": 1},
                {"logit_bias": {9: 3.0}},
                {"rules": OutputRules(regex="(a|bc){20,30}"), "temperature": 1.0, "seed": 9},
                {"rules": OutputRules(choice=("alpha", "beta"))},
            ),
            strict=True,
        )
    ]
    found = []
    for disable_graph in (True, False):
        settings = {**SETTINGS, "disable_graph": disable_graph}
        with LLM(tiny, extra_plugins=[recorded], **settings) as llm:
            outputs = llm.generate(prompts, params)
            for count in graph_sizes(EngineConfig(**SETTINGS)):  # which runs depends on the rules
                llm.generate([[5]] * count, SamplingParams(max_tokens=30, ignore_eos=True))
            platform = llm._assembly.platform
            found.append([(o.token_ids, o.finish_reason) for o in outputs])
    assert found[1] == found[0]
    assert re.fullmatch("(a|bc){20,30}", outputs[8].text) and outputs[9].text in ("alpha", "beta")
    sizes = graph_sizes(EngineConfig(**SETTINGS))
    assert sizes == (1, 2, 4, 6) and len(platform.backend.replays) == 8
    assert all(count > 0 for count in platform.backend.replays[::2])  # those of the model
    assert any(count > 0 for count in platform.backend.replays[1::2])  # draws behind masks


RULES = OutputRules(regex="(a|bc|[d-k]x){20,30}")


@pytest.mark.parametrize(
    ("extras", "replayed"),
    [
        ([{}, {"temperature": 0.9, "seed": 2}, {"logprobs": 1}], False),
        (
            [{"rules": RULES, "temperature": 1.0, "seed": 7}, {}, {"rules": RULES, "logprobs": 2}],
            True,
        ),
        ([{}, {"rules": RULES, "temperature": 1.0, "top_p": 0.8, "min_p": 0.1, "seed": 1}], True),
        ([{"rules": RULES, "frequency_penalty": 0.5}], False),
    ],
)
def test_masks_are_applied_within_captured_steps(tiny, recorded, extras, replayed):
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **one) for one in extras]
    found = []
    for disable_graph in (True, False):
        settings = {**SETTINGS, "disable_graph": disable_graph}
        with LLM(tiny, extra_plugins=[recorded], **settings) as llm:
            outputs = llm.generate([[5 + i, 9] for i in range(len(params))], params)
            platform = llm._assembly.platform
            found.append([o.token_ids for o in outputs])
    assert found[1] == found[0]
    assert any(platform.backend.replays[1::2]) is replayed


def plans(runner, count):
    """A prompt per row, then decode steps, in which some requests leave."""
    works, init = [], []
    for row in range(count):
        prompt = [(row * 37 + i) % 250 + 2 for i in range(11 + row)]
        init.append(RowInit(row=row, params=SamplingParams(), seed=0, choice=0, prompt=prompt))
        pages = [row * 3 + i + 4 for i in range(3)]
        works.append(
            Work(rid=str(row), row=row, start=0, length=len(prompt), pages=pages, tokens=prompt)
        )
    yield StepPlan(step=0, works=works, init=init)
    for step in range(1, 6):
        left = works[: max(1, count - step // 2)]
        decodes = [
            Work(rid=w.rid, row=w.row, start=w.length + step - 1, length=1, pages=w.pages)
            for w in left
        ]
        yield StepPlan(step=step, works=decodes)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_replay_changes_what_an_eager_step_changes(runner, count):
    """Hidden padding: spare rows write to no page and to no request's last token."""
    seen = {}
    for captured in (False, True):
        for cache in runner.caches:
            cache[:-1].fill_(float("nan"))
        runner.last_tokens[:-1] = 77
        runner.programs.serves = captured
        tokens = [
            [w.tokens for w in runner.collect(runner.launch(plan)).works]
            for plan in plans(runner, count)
        ]
        runner.programs.serves = True
        seen[captured] = tokens, [c[:-1].clone() for c in runner.caches], runner.last_tokens.clone()
        assert all(torch.equal(c[-1], torch.zeros_like(c[-1])) for c in runner.caches)
    assert seen[True][0] == seen[False][0]
    for got, want in zip(seen[True][1], seen[False][1], strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(seen[True][2], seen[False][2])
    assert runner.last_tokens[-1] == 0
    size = {1: 1, 3: 4, 5: 6}[count]
    assert torch.isfinite(runner.programs.captured[size, 1].logits).all(), (
        "spare rows are numbers, whatever pages hold"
    )


def test_only_decode_steps_that_fit_are_replayed(runner):
    def fitting(*lengths):
        works = [
            Work(rid=str(i), row=i, start=5, length=n, pages=[i], tokens=[3] * n if n > 1 else None)
            for i, n in enumerate(lengths)
        ]
        program = runner.programs.select(StepPlan(step=0, works=works))
        return None if program is runner.programs.op_by_op else program.size

    assert [fitting(*(1,) * n) for n in range(1, 8)] == [1, 2, 4, 4, 6, 6, None]
    assert fitting(1, 2) is None


def test_sizes():
    for most in (1, 2, 3, 8, 9, 64, 100, 256, 300, 1000):
        sizes = graph_sizes(EngineConfig(max_running_requests=most))
        assert sizes == tuple(sorted(set(sizes))) and sizes[0] == 1 and sizes[-1] == most
        gaps = [b - a for a, b in itertools.pairwise(sizes)]
        assert all(gap <= max(8, a // 4) for gap, a in zip(gaps, sizes, strict=False))
    assert graph_sizes(EngineConfig(max_running_requests=8, graph_sizes=(8, 2, 2))) == (2, 8)
    with pytest.raises(ConfigError, match="--graph-sizes 2,9: at most --max-running-requests 8"):
        check_graph_sizes(EngineConfig(max_running_requests=8, graph_sizes=(2, 9)))
    with pytest.raises(ConfigError, match="--graph-sizes 2,65: at most"):
        assemble(EngineConfig(model="demo", platform="cpu", graph_sizes=(2, 65)))
    with pytest.raises(ConfigError, match="--graph-sizes 2: --disable-graph captures none"):
        check_graph_sizes(EngineConfig(graph_sizes=(2,), disable_graph=True))
    with pytest.raises(ConfigError, match="--graph-sizes 0,4: must be numbers of at least 1"):
        EngineConfig(graph_sizes=(0, 4))


def test_a_kernel_that_cannot_be_captured_turns_captures_off_and_is_named(tiny, recorded):
    runner = make(tiny, recorded, pin=("experts=reference",))
    assert not runner.programs.sizes and runner.config.disable_graph
    (change,) = [c for c in runner.assembly.plan.changes if c[0] == "disable_graph"]
    assert change[1:3] == ("False → True", "core")
    assert "experts" in change[3] and "not safe under graph capture" in change[3]


def test_a_kernel_that_lies_about_captures_is_a_sentence(tiny, recorded, monkeypatch):
    apply = recorded.Experts.apply

    def reads(self, x, weights, ids, packed):
        assert ids.max().item() >= 0
        return apply(self, x, weights, ids, packed)

    runner = make(tiny, recorded)
    monkeypatch.setattr(recorded.Experts, "apply", reads)
    said = "a decode step of 6 requests cannot be captured: .*item waits.*; --disable-graph"
    with pytest.raises(PluginError, match=said):
        runner.programs.capture(progress=False)


def test_captures_show_their_progress(tiny, recorded, capsys):
    make(tiny, recorded).warm_up()
    assert "capturing decode steps: 4 steps of 4 steps" in capsys.readouterr().err


def test_disable_graph_leaves_facts_and_caches_alone(tiny, recorded):
    runner = make(tiny, recorded, disable_graph=True)
    assert not runner.programs.sizes and not runner.assembly.facts.graph_capture
    assert next(iter(runner.caches)).shape[0] == runner.num_pages


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0, 2.0]) + x[0, :2],
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: torch.unique(x),
    ],
)
def test_the_recorder_refuses_what_a_device_would(reads):
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match="waits for the device"):
        ReplayBackend().capture(lambda: reads(x))


def test_the_recorder_replays_on_the_same_tensors():
    x, out = torch.randn(3, 4), torch.empty(3, 4)
    host = [1.0]

    def run():
        y = x.T.contiguous()
        y[:2] *= 3.0
        out.copy_((y.T + host[0]).flip(0))

    backend = ReplayBackend()
    replay = backend.capture(run)
    for _ in range(3):
        x.normal_()
        host[0] = 100.0  # what the host decided stays as it was
        replay()
        got = out.clone()
        host[0] = 1.0
        run()
        assert torch.equal(got, out)
    assert backend.replays == [3]
