"""Steps launched before the last one's tokens are known: nobody sees the difference."""

from __future__ import annotations

import random

import pytest
from ahead import engine

from ds_runtime import SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.messages import Submit
from ds_runtime.parallel.world import World

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": 1_000_000,
    "threads": 1,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "max_step_tokens": 40,
}


class Watched:
    """A runner that notes what it was asked for, and how many steps were under way."""

    def __init__(self, runner):
        self._runner = runner
        self.calls = []
        self.under_way = 0
        self.most = 0

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def launch(self, plan):
        self.calls.append(("launch", plan.step))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return self._runner.launch(plan)

    def collect(self, handle):
        self.calls.append(("collect", handle.plan.step))
        self.under_way -= 1
        return self._runner.collect(handle)


@pytest.fixture(scope="module")
def runner(tiny):
    return Runner(assemble(EngineConfig(model=str(tiny), **SETTINGS), SETTINGS), World.alone())


def submits():
    draw = random.Random(3)
    settings = (
        {"max_tokens": 1},
        {"max_tokens": 2, "temperature": 0.8},
        {"max_tokens": 30},
        {"max_tokens": 17, "temperature": 1.0, "frequency_penalty": 0.7, "logprobs": 2},
        {"max_tokens": 40, "stop_token_ids": tuple(range(2, 60))},
        {"max_tokens": 25, "min_tokens": 6, "stop_token_ids": tuple(range(2, 120))},
        {"max_tokens": 9, "prompt_logprobs": 1},
        {"max_tokens": None, "logit_bias": {7: 40.0}},
    )
    for i, params in enumerate(settings):
        prompt = [draw.randrange(2, 258) for _ in range(draw.choice([1, 5, 20, 70]))]
        yield Submit(rid=str(i), prompt=prompt, params=SamplingParams(**params), seed=i)


def run(made, asked):
    """Every message of every request, in order."""
    found = {s.rid: [] for s in asked}
    for submit in asked:
        assert made.submit(submit) is None
    while made.has_work:
        for message in made.step():
            assert not found[message.rid] or found[message.rid][-1].finish is None, "after its end"
            found[message.rid].append(message)
    assert not made.scheduler.holdings.num_free + made.scheduler.holdings.num_cached < (
        made.runner.num_pages
    ), "a page is lost"
    return found


def test_messages_are_the_same_step_by_step(runner):
    asked = list(submits())
    plain, ahead = engine(Watched(runner), False), engine(Watched(runner), True)
    want, got = run(plain, asked), run(ahead, asked)
    for rid, messages in want.items():
        assert [replace_cached(m) for m in got[rid]] == [replace_cached(m) for m in messages], rid
    assert (plain.runner.most, ahead.runner.most) == (1, 2)
    finishes = {m.finish for messages in want.values() for m in messages}
    assert finishes == {None, "stop", "length"}


def replace_cached(message):
    """Preemptions and admissions may fall on other steps; what was cached is no answer."""
    message.cached_tokens, message.prefill_seconds = 0, 0.0
    return message


def test_a_step_is_launched_before_the_last_is_collected(runner):
    ahead = engine(Watched(runner), True)
    run(ahead, [Submit(rid="x", prompt=[5, 6], params=SamplingParams(max_tokens=4), seed=0)])
    expected = ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "launch 3"]
    assert [f"{a} {b}" for a, b in ahead.runner.calls] == [*expected, "collect 2", "collect 3"]


def test_overlap_is_switched_off(runner):
    plain = engine(Watched(runner), True, disable_overlap_schedule=True)
    run(plain, [Submit(rid="x", prompt=[5, 6], params=SamplingParams(max_tokens=4), seed=0)])
    assert plain.runner.most == 1


def test_nothing_of_an_aborted_request_comes_out(runner):
    ahead = engine(Watched(runner), True)
    params = SamplingParams(max_tokens=30)
    for rid in ("a", "b"):
        ahead.submit(Submit(rid=rid, prompt=[9, 8, 7], params=params, seed=0))
    seen = []
    for step in range(200):
        if not ahead.has_work:
            break
        if step == 6:
            ahead.abort(["a"])
            before = len(seen)
        seen += [m.rid for m in ahead.step()]
    assert "a" in seen[:before] and "a" not in seen[before:]
    assert seen.count("b") == 30


def test_a_row_given_away_in_flight_draws_for_its_new_owner(runner):
    """Rows, sampling settings and penalties change hands while a step is under way."""
    asked = list(submits()) * 2
    for i, submit in enumerate(asked):
        asked[i] = Submit(rid=str(i), prompt=submit.prompt, params=submit.params, seed=i)
    want = run(engine(Watched(runner), False), asked)
    got = run(engine(Watched(runner), True), asked)
    assert {r: [m.tokens for m in ms] for r, ms in got.items()} == {
        r: [m.tokens for m in ms] for r, ms in want.items()
    }
