"""The number of drafts that pays, found from times and outcomes of a simulated engine."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.speculate.draft_length import Pace
from ds_runtime.engine.step.plan import StepPlan, StepResult, Work, WorkResult


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


def test_prompts_draft_what_was_best_for_as_many_requests():
    pace = Pace(Speculation(2, 1, 3, adaptive=True))
    assert pace.choose(0, 8) == 2, "nothing is known yet"
    simulate(pace, (1.0, 1.9, 2.8), 0.7, 8, 60)
    simulate(pace, (1.0, 1.1, 1.2), 0.9, 1, 60)
    assert (pace.choose(0, 8), pace.choose(0, 15), pace.choose(0, 1)) == (0, 0, 2)
    pace.forced = 1
    assert pace.choose(0, 8) == 1


def test_without_adaptation_or_when_forced_nothing_is_chosen():
    fixed = Pace(Speculation(3, 1, 4))
    assert {fixed.choose(n) for n in range(9)} == {3}
    fixed.forced = 1
    assert fixed.choose(5) == 1
    tree = Pace(Speculation(2, 3, 7, adaptive=True))
    assert simulate(tree, {0: 1.0, 6: 1.1}, 0.9, 2, 200)[0][-1] == 6


# Milliseconds of steps with 0 to 3 drafts, by requests: an H200 with two shapes of model (the first
# and the last row of the narrow one and the plain steps of the other were measured).
NARROW = {1: (7.2, 12.1, 10.2, 11.5), 32: (10.2, 14.7, 17.3, 17.8)}
SLICE = {
    1: (1.4, 2.7, 3.7, 4.7),
    8: (2.9, 5.6, 7.8, 10.0),
    32: (5.1, 8.6, 11.0, 13.0),
    64: (6.2, 9.3, 11.6, 13.7),
    128: (8.4, 11.9, 14.4, 16.8),
}


class Device:
    """An engine without a device, whose clock goes by such a table."""

    def __init__(self, table, seed=0):
        self.table, self.now, self.chance = table, 0.0, random.Random(seed)

    def seconds(self, count, drafts):
        """Between two rows of the table in proportion to the logarithm of the number."""
        sizes = sorted(self.table)
        high = next((s for s in sizes if s >= count), sizes[-1])
        low = max(s for s in sizes if s <= count)
        share = 0.0 if high == low else math.log(count / low) / math.log(high / low)
        ends = self.table[low][drafts], self.table[high][drafts]
        return (ends[0] + share * (ends[1] - ends[0])) * 1e-3 * self.chance.uniform(0.98, 1.02)

    def batch(self, pace, count, tokens=250, right=0.8):
        """Seconds of a batch; requests end one after the other, as luck has it."""
        start, left, verified, step = self.now, [tokens] * count, 0, 0
        self.now += 0.01
        prompt = [Work(rid="0", row=0, start=0, length=9, pages=[0], tokens=[1] * 9)]
        plan = StepPlan(step=0, works=prompt)
        pace.note(plan, StepResult(step=0, works=[WorkResult(rid="0", tokens=[1])]), self.now)
        while left:
            drafts = pace.choose(len(left))
            works, results = [], []
            for i in range(len(left)):
                length = min(1 + verified, left[i])
                works.append(Work(rid=str(i), row=i, start=9, length=length, pages=[i]))
                kept = 1
                while kept < length and self.chance.random() < right:
                    kept += 1
                results.append(WorkResult(rid=str(i), tokens=[1] * kept))
                left[i] -= kept
            step += 1
            self.now += self.seconds(len(left), max(verified, drafts))
            plan = StepPlan(step=step, works=works, drafts=drafts)
            pace.note(plan, StepResult(step=step, works=results), self.now)
            left, verified = [n for n in left if n > 0], drafts
        return self.now - start


def chain(forced=None):
    pace = Pace(Speculation(3, 1, 4, adaptive=True))
    pace.forced = forced
    return pace


@pytest.mark.parametrize(
    ("table", "counts"), [(NARROW, (1, 32)), (SLICE, (1, 8, 64)), (SLICE, (32, 1))]
)
def test_batches_that_end_are_as_fast_as_with_the_best_number(table, counts):
    """Of each size six batches, of which three may try: the others take about as long as with the
    best fixed number, and never longer than without drafts.
    """
    device, pace = Device(table), chain()

    def mean(pace, count, device):
        return statistics.mean(
            device.batch(pace, count, 200 // (1 + count // 64)) for _ in range(3)
        )

    for count in counts:
        fixed = [mean(chain(n), count, Device(table, seed=n)) for n in range(4)]
        assert mean(pace, count, device) < 1.1 * fixed[0]
        rest = mean(pace, count, device)
        assert rest < 1.04 * min(fixed) and rest < fixed[0] / 0.98, (count, rest, fixed)


def test_sizes_that_are_passed_are_not_tried_out():
    """A batch of 32 that ends passes four other sizes, each for a few steps."""
    device, pace = Device(NARROW), chain()
    device.batch(pace, 32)
    chosen = []
    choose, pace.choose = pace.choose, lambda n: chosen.append((n, choose(n))) or chosen[-1][1]
    for _ in range(3):
        device.batch(pace, 32)
    passed = [drafts for count, drafts in chosen if count < 32]
    assert len(passed) > 15 and passed.count(3) > 0.9 * len(passed)


def test_a_trial_that_is_interrupted_is_given_up_and_comes_later():
    """As where a batch begins to end while it lasts; plain steps were never seen before."""
    device, pace = Device(NARROW), chain()
    for drafts in (1, 2, 3):
        pace.forced = drafts
        device.batch(pace, 32, 81)
    pace.forced = None
    for pause in (6, 12, 24):
        assert [pace.choose(32) for _ in range(pause)] == [3] * (pause - 1) + [0]
        assert pace.choose(32) == 0 and pace.choose(31) == 3
