"""Everything goes with everything on two ranks: runs that cover each pair of what can be on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from pairs import (
    CHANGING,
    FIRST,
    REFUSED,
    ask,
    check_answers,
    check_served,
    checkpoints,
    every_pair,
    fewest,
    pairs_of,
    settings_of,
)

from ds_runtime import LLM
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime_kit.support import APART
from parts import some_of

SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"
SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": 8_000_000,
    "context_length": 256,
    "threads": 1,
    "max_running_requests": 6,
    "chunked_prefill_size": 24,
    "page_size": 8,
    "dist_timeout": 60,
}
RUNS = fewest(every_pair())


def test_runs_have_every_pair_and_are_few():
    assert set().union(*map(pairs_of, RUNS)) == every_pair()
    assert 6 <= len(RUNS) <= 12


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny):
    return checkpoints(tmp_path_factory, tiny)


@pytest.fixture(scope="module")
def alone(made):
    @cache
    def answers(levels):
        run = {**FIRST, **dict(levels)}
        with LLM(made[run["model"]], **settings_of(run, made, SETTINGS)) as llm:
            return ask(llm, run)

    return lambda run: answers(tuple((factor, run[factor]) for factor in CHANGING))


def check(run, made, alone):
    expected = alone(run)
    with LLM(made[run["model"]], **settings_of(run, made, SETTINGS), tp=2) as llm:
        found = ask(llm, run)
        check_served(llm, run, found)
    check_answers(found, expected, run)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: ", ".join(run.values()))
def test_answers_are_those_of_one_rank(made, alone, run):
    check(run, made, alone)


@pytest.mark.parametrize("pair", REFUSED, ids=str)
def test_a_refused_pair_is_a_sentence_and_its_reason_is_told(made, pair):
    run = {**FIRST, **dict(pair)}
    flag = "--disable-mla" if "form" in dict(pair) else "--batch-invariant"
    with pytest.raises((ConfigError, UnsupportedError), match=flag):
        LLM(made[run["model"]], **settings_of(run, made, SETTINGS), tp=2)
    rows = [line for line in SUPPORT.read_text().splitlines() if line.startswith("|")]
    assert any(all(word in row for word in REFUSED[pair]) for row in rows)
    assert len(REFUSED) == len(APART)


BY_ITSELF = sorted(p for p in every_pair() if all(FIRST[f] != level for f, level in p))


@pytest.mark.slow
@pytest.mark.parametrize("pair", some_of(BY_ITSELF, 8), ids=str)
def test_each_pair_by_itself(made, alone, pair):
    """Nothing else is on that could hide what two do to each other: all of a release, some of each
    run. Each pair is in the runs above as well.
    """
    check({**FIRST, **dict(pair)}, made, alone)
