"""How many tokens the next step drafts, from what steps took and how many drafts were right.

Of every number of running requests, in powers of two, the median time of steps is kept per number
of drafts; how often a draft is right, behind right ones, is the same for all. The best is what
gives most tokens a second. Plain decode is one of the choices: no drafts.
"""

from __future__ import annotations

import statistics
from collections import deque

from ds_runtime.engine.step import StepPlan, StepResult
from ds_runtime.speculation import Speculation

_SAMPLES = 9  # times of which the median counts
_ENOUGH = 3  # of them are wanted of a choice before it is judged
_AGAIN = 256  # steps between two looks at a choice that is not the best
_BETTER = 1.02  # by so much another must be better to take its place
_MEMORY = 512  # drafts whose outcomes count; older ones count half, then a quarter


class Pace:
    """`forced`: a number of drafts for a measurement, whatever else is known."""

    def __init__(self, shape: Speculation) -> None:
        self.forced: int | None = None
        self._shape = shape
        self._choices = shape.choices
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._best: dict[int, int] = {}  # choice by size
        self._steps: dict[int, int] = {}  # chosen so far, by size
        self._right = [0.0] * shape.steps  # by depth
        self._tried = [0.0] * shape.steps
        self._last: tuple[float, int, int] | None = None  # time, size and drafts of the last step

    def choose(self, count: int) -> int:
        """Drafts behind each of `count` decoding requests, or in a step without any."""
        if self.forced is not None or len(self._choices) == 1 or not count:
            return self._choices[-1] if self.forced is None else self.forced
        size = count.bit_length()
        step = self._steps[size] = self._steps.get(size, 0) + 1
        for drafts in self._choices:
            if len(self._known(size, drafts)) < _ENOUGH:
                return drafts
            if drafts and self.rate(size, drafts) < 0.8 * self.rate(size, self._previous(drafts)):
                break  # longer ones are no better
        known = [n for n in self._choices if len(self._known(size, n)) >= _ENOUGH]
        top = max(known, key=lambda n: self.rate(size, n))
        best = self._best.setdefault(size, top)
        if best not in known or self.rate(size, top) > _BETTER * self.rate(size, best):
            best = self._best[size] = top
        turn, phase = divmod(step, _AGAIN)
        if phase < _ENOUGH and turn:  # look again at one beside it
            near = [n for n in known if abs(known.index(n) - known.index(best)) == 1]
            return near[turn % len(near)] if near else best
        return best

    def _previous(self, drafts: int) -> int:
        return self._choices[self._choices.index(drafts) - 1]

    def _known(self, size: int, drafts: int) -> deque[float]:
        return self._times.setdefault((size, drafts), deque(maxlen=_SAMPLES))

    def tokens(self, drafts: int) -> float:
        """Tokens that a request is expected to get of a step."""
        total, alive = 1.0, 1.0
        for depth in range(min(drafts, self._shape.steps)):
            alive *= (self._right[depth] + 1) / (self._tried[depth] + 2)
            total += alive
        return total

    def rate(self, size: int, drafts: int) -> float:
        """Tokens of a request per second, with what is known; size: the bits of their number."""
        return self.tokens(drafts) / statistics.median(self._known(size, drafts))

    def note(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """A step's results are here, at `now` seconds."""
        last, self._last = self._last, None
        for work, outcome in zip(plan.works, result.works, strict=True):
            if work.tokens is None and work.length > 1:
                self._outcome(len(outcome.tokens) - 1, min(work.length - 1, self._shape.steps))
        if any(w.tokens is not None for w in plan.works):
            return
        size = len(plan.works).bit_length()
        self._last = now, size, plan.drafts
        verified = max(w.length for w in plan.works) - 1
        # Where the number of drafts has just changed, a step verifies another than it drafts.
        if last is not None and last[1:] == (size, plan.drafts) and verified == plan.drafts:
            self._known(size, plan.drafts).append(now - last[0])

    def _outcome(self, right: int, depth: int) -> None:
        for i in range(min(depth, right + 1)):
            self._tried[i] += 1
            self._right[i] += right > i
            if self._tried[i] > _MEMORY:
                self._tried[i] /= 2
                self._right[i] /= 2
