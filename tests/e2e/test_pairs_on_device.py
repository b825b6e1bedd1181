"""The pairs that matter most where ranks have accelerators of their own: two, or four.

Drafts and both ways to divide a model, each with everything that can be on or off, in float32:
answers are those of one device. All that can be on together, in bfloat16 of FP8 weights with the
heads of V3, for which the served kernels are made.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from pairs import (
    CHANGING,
    FIRST,
    LEVELS,
    ask,
    check_answers,
    check_near,
    check_served,
    checkpoints,
    every_pair,
    fewest,
    pairs_of,
    settings_of,
)

from ds_runtime import LLM
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_kit.models.tiny import V3_HEADS

TOLERANCE = 5e-4  # float32 in other orders of summation
WIDE = {
    **V3_HEADS,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "q_lora_rank": 256,
    "num_hidden_layers": 2,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 64,
}  # and whole blocks of each of four ranks, which FP8 kernels are made for
AT_ONCE = 6  # requests
LEADING = ("attention", "drafts", "experts")


def on(pair):
    return all(FIRST[factor] != level for factor, level in pair)


def leads(pair):
    return any(factor in LEADING and FIRST[factor] != level for factor, level in pair)


def unserved(run):
    """A cache of FP8 with scales, which sparse attention has, is served with other bits."""
    return (run["model"], run["cache"], run["bits"]) == ("sparse", "fp8", "invariant")


# A cache of codes has no exact answers: it is in the runs of FP8.
LED = {pair for pair in every_pair() if leads(pair) and ("cache", "fp8") not in pair}
EXACT = [{**run, "cache": "float32"} for run in fewest(LED)]
TOGETHER = fewest({pair for pair in every_pair() if on(pair)}, unserved)


def test_few_runs_have_the_pairs_that_matter_most():
    assert set().union(*map(pairs_of, EXACT)) >= LED
    assert set().union(*map(pairs_of, TOGETHER)) >= set(filter(on, every_pair()))
    assert len(EXACT) <= 8 and len(TOGETHER) <= 5
    assert all(set(run) == set(LEVELS) for run in (*EXACT, *TOGETHER))


@pytest.fixture(scope="module")
def ranks():
    """As many as there are accelerators, up to four."""
    best, _ = select_platform(load_plugins())
    if not best.asynchronous:
        pytest.skip(f"the best platform here is {best.name}")
    count = torch.accelerator.device_count()
    if count < 2:
        pytest.skip("there is one device")
    return 4 if count >= 4 else 2


@pytest.fixture(scope="module")
def settings():
    best, _ = select_platform(load_plugins())
    return {
        "platform": best.name,
        "kv_memory": 64_000_000,
        "context_length": 256,
        "max_running_requests": AT_ONCE,
        "dist_timeout": 60,
    }


def divided(run, ranks):
    """What `--ep 2` of the runs is with more ranks."""
    return {"tp": ranks, **({"ep": ranks} if run["experts"] == "by number" else {})}


class Kind:
    """Checkpoints of a dtype, and answers of one device. asked: as of `ask`."""

    def __init__(self, made, settings, **asked):
        self.made, self.settings, self.asked = made, settings, asked
        self.alone = cache(self._alone)

    def _alone(self, levels, second, at_once):
        run = {**FIRST, **dict(levels)}
        given = settings_of(run, self.made, self.settings, second)
        given["max_running_requests"] = at_once
        with LLM(self.made[run["model"]], **given) as llm:
            return ask(llm, run, **self.asked)

    def one_device(self, run, at_once=AT_ONCE):
        """Its answers with this many requests in a step at most."""
        second = "d" if run["graphs"] == "on" else "e"
        return self.alone(tuple((factor, run[factor]) for factor in CHANGING), second, at_once)

    def both(self, run, ranks):
        """(answers of the ranks, those of one device)."""
        second, expected = "d" if run["graphs"] == "on" else "e", self.one_device(run)
        given = settings_of(run, self.made, self.settings, second) | divided(run, ranks)
        with LLM(self.made[run["model"]], **given) as llm:
            found = ask(llm, run, **self.asked)
            check_served(llm, run, found, ranks)
            captured = llm._assembly.platform.captures and not llm._assembly.config.disable_graph
            assert captured == (run["graphs"] == "on" and llm._assembly.platform.captures)
        return found, expected


@pytest.fixture(scope="module")
def exact(tmp_path_factory, tiny, settings):
    sizes = {"page_size": 16, "chunked_prefill_size": 24, "max_step_tokens": 60}
    return Kind(checkpoints(tmp_path_factory, tiny), {**settings, **sizes, "dtype": "float32"})


@pytest.fixture(scope="module")
def coarse(tmp_path_factory, tiny, settings):
    made = checkpoints(tmp_path_factory, tiny, "fp8", **WIDE)
    sizes = {"page_size": 64, "chunked_prefill_size": 96, "max_step_tokens": 240}
    lengths = (15, 120, 63, 180, 3, 99)
    return Kind(made, {**settings, **sizes, "dtype": "bfloat16"}, best=2, lengths=lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("run", EXACT, ids=lambda run: ", ".join(run.values()))
def test_float32_gives_the_answers_of_one_device(ranks, exact, run):
    found, expected = exact.both(run, ranks)
    check_answers(found, expected, run, TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("run", TOGETHER, ids=lambda run: ", ".join(run.values()))
def test_fp8_gives_nearly_the_answers_of_one_device(ranks, coarse, run):
    found, expected = coarse.both(run, ranks)
    check_near(found, expected, run, coarse.one_device(run, 1))
