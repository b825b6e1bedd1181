"""The number of drafts that pays, found from times and outcomes of a simulated engine."""

from __future__ import annotations

import random

import pytest

from ds_runtime.engine.pace import Pace
from ds_runtime.engine.step import StepPlan, StepResult, Work, WorkResult
from ds_runtime.speculation import Speculation


def simulate(pace, times, right, count, steps, seed=0):
    """Decode steps of `count` requests; times: seconds by drafts; right: probability of a draft.
    (drafts of each step, tokens per second).
    """
    chance, now, verified, chosen, tokens = random.Random(seed), 0.0, 0, [], 0
    for step in range(steps):
        drafts = pace.choose(count)
        works = [
            Work(rid=str(i), row=i, start=9, length=1 + verified, pages=[i]) for i in range(count)
        ]
        plan = StepPlan(step=step, works=works, drafts=drafts)
        results = []
        for work in works:
            kept = 1
            while kept < work.length and chance.random() < right:
                kept += 1
            results.append(WorkResult(rid=work.rid, tokens=[1] * kept))
            tokens += kept
        now += times[drafts] * chance.uniform(0.97, 1.03)
        pace.note(plan, StepResult(step=step, works=results), now)
        chosen.append(drafts)
        verified = drafts
    return chosen, tokens / now


@pytest.mark.parametrize(
    ("times", "right", "best"),
    [
        ((1.0, 1.2, 1.4, 1.6), 0.9, 3),  # drafts are cheap and right
        ((1.0, 1.2, 1.4, 1.6), 0.45, 1),
        ((1.0, 1.7, 2.6, 3.5), 0.6, 0),  # verifying costs as much as decoding
        ((1.0, 2.1, 2.2, 2.3), 0.9, 3),  # only the first draft is dear
        ((1.0, 2.6, 4.0, 5.4), 0.9, 0),
    ],
)
@pytest.mark.parametrize("count", [1, 6])
def test_what_pays_is_found_and_kept(times, right, best, count):
    pace = Pace(Speculation(3, 1, 4, adaptive=True))
    simulate(pace, times, right, count, 300)
    chosen, rate = simulate(pace, times, right, count, 1200, seed=1)
    assert chosen.count(best) > 0.95 * len(chosen)
    length = sum(right**i for i in range(best + 1))
    assert rate == pytest.approx(count * length / times[best], rel=0.06)


def test_every_batch_size_has_its_own_choice():
    """As on a device whose small batches wait for memory, and whose large ones compute."""
    pace = Pace(Speculation(2, 1, 3, adaptive=True))
    small, large = (1.0, 1.1, 1.2), (1.0, 1.9, 2.8)
    for _ in range(3):
        simulate(pace, small, 0.7, 1, 60)
        simulate(pace, large, 0.7, 64, 60)
    assert simulate(pace, small, 0.7, 1, 20)[0].count(2) > 16
    assert simulate(pace, large, 0.7, 64, 20)[0].count(0) > 16


def test_a_change_of_acceptance_is_followed():
    pace = Pace(Speculation(2, 1, 3, adaptive=True))
    times = (1.0, 1.3, 1.6)
    assert simulate(pace, times, 0.9, 4, 300)[0][-1] == 2
    assert simulate(pace, times, 0.05, 4, 2000)[0][-200:].count(0) > 190
    assert simulate(pace, times, 0.9, 4, 4000)[0][-1] > 0, "what was off is looked at again"


def test_without_adaptation_or_when_forced_nothing_is_chosen():
    fixed = Pace(Speculation(3, 1, 4))
    assert {fixed.choose(n) for n in range(9)} == {3}
    fixed.forced = 1
    assert fixed.choose(5) == 1
    tree = Pace(Speculation(2, 3, 7, adaptive=True))
    assert simulate(tree, {0: 1.0, 6: 1.1}, 0.9, 2, 200)[0][-1] == 6
