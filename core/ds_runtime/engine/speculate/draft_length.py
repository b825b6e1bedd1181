"""How many tokens the next step drafts, from what steps took and how many drafts were right.

Of every number of running requests, in powers of two, the median time of steps is kept per number
of drafts. How often a draft is right, after right ones, is the same for all. The best is what gives
most tokens a second. Plain decode is one of the choices: no drafts.

A time that was never seen at a size is guessed from the nearest size where it was: as much longer
than the time of another choice as there. So a size that is passed in a few steps, as when a batch
ends, is never a place for trials. One that stays is looked at where the guess leaves hope.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.step.plan import StepPlan, StepResult

_SAMPLES = 9  # times of which the median counts
_ENOUGH = 3  # of them are wanted of a choice before it is judged
_PAUSE = 24  # steps at a size before a choice is tried that is only guessed there; then doubled
_PLAIN_PAUSE = 6  # before plain steps are, which cost little where they are not the best
_AGAIN = 256  # steps between two looks at a choice that is known not to be the best
_HOPE = 1.15  # by so much a guess may be wrong per power of two that it comes from
_BETTER = 1.02  # by so much another must be better to take its place
_MEMORY = 512  # drafts whose outcomes count; older ones count half, then a quarter


@dataclass(slots=True)
class _Size:
    """What is known of steps with a number of requests. pause: steps since the last look; turn:
    looks so far; look: a choice that is tried, for `left` more steps; failed: trials that ended too
    early, because the number of requests changed.
    """

    times: dict[int, deque[float]] = field(default_factory=dict)  # by drafts
    best: int | None = None
    pause: int = 0
    turn: int = 0
    look: int = 0
    left: int = 0
    failed: int = 0

    def stop(self) -> None:
        """Other numbers of requests come in between: steps are not timed."""
        self.failed += self.left > 0 and self.time(self.look) is None
        self.left = 0

    def time(self, drafts: int) -> float | None:
        """Seconds of a step, if enough were seen."""
        seen = self.times.get(drafts, ())
        return statistics.median(seen) if len(seen) >= _ENOUGH else None


class Pace:
    """`forced`: a number of drafts for a measurement, whatever else is known."""

    def __init__(self, shape: Speculation) -> None:
        self.forced: int | None = None
        self._shape = shape
        self._choices = shape.choices
        self._sizes: dict[int, _Size] = {}  # by the bits of the number of requests
        self._right = [0.0] * shape.steps  # by depth
        self._tried = [0.0] * shape.steps
        self._last: tuple[float, int, int] | None = None  # time, size and drafts of the last step
        self._at = 0  # the size that was chosen for last

    def choose(self, count: int, coming: int = 0) -> int:
        """Drafts after each of `count` decoding requests; in a step without any, after prompts,
        what was best for as many as are coming."""
        if self.forced is not None or len(self._choices) == 1:
            return self._choices[-1] if self.forced is None else self.forced
        if not count:
            before = self._sizes.get(coming.bit_length())
            return self._choices[-1] if before is None or before.best is None else before.best
        bits = count.bit_length()
        size = self._sizes.setdefault(bits, _Size())
        if bits != self._at and (before := self._sizes.get(self._at)) is not None:
            before.stop()
        self._at = bits
        if size.left:
            size.left -= 1
            return size.look
        rates = {n: r for n in self._choices if (r := self._rate(bits, n)) is not None}
        if not rates:
            return self._try(size, self._choices[0])
        top = max(rates, key=lambda n: rates[n])
        if size.best not in rates or rates[top] > _BETTER * rates[size.best]:
            size.best = top
        size.pause += 1
        wanted = self._wanted(bits, rates)
        return size.best if wanted is None else self._try(size, wanted)

    def _try(self, size: _Size, drafts: int) -> int:
        """Draft so many until they have been timed; the first such step is not timed."""
        size.look, size.left, size.pause = drafts, _ENOUGH, 0
        size.turn += 1
        return drafts

    def _wanted(self, bits: int, rates: dict[int, float]) -> int | None:
        """A choice that is worth a trial now."""
        size = self._sizes[bits]
        assert size.best is not None
        alone = not any(other.times for b, other in self._sizes.items() if b != bits)
        for drafts in self._choices:
            pause = (_PAUSE if drafts else _PLAIN_PAUSE) << size.failed
            if not alone and size.pause < pause:
                continue
            if size.time(drafts) is None and self._hope(bits, drafts) > rates[size.best]:
                return drafts
            worse = rates[drafts] < 0.8 * rates[size.best] if drafts in rates else False
            if worse and drafts > size.best:
                break  # longer ones are no better
        if size.pause < _AGAIN:
            return None
        known = [n for n in self._choices if size.time(n) is not None]
        if size.best not in known:
            return size.best
        near = [n for n in known if abs(known.index(n) - known.index(size.best)) == 1]
        size.pause = 0
        return near[size.turn % len(near)] if near else None

    def _hope(self, bits: int, drafts: int) -> float:
        """The rate of a choice that was not seen at this size, if its guess is as wrong as it may
        be.
        """
        seen = self._nearest(bits, drafts)
        rate = self._rate(bits, drafts)
        if seen is None or rate is None:
            return float("inf")
        return rate * _HOPE ** abs(seen - bits)

    def _nearest(self, bits: int, drafts: int) -> int | None:
        """The size nearest to this one where a choice was timed; of two the larger."""
        found = [b for b, size in self._sizes.items() if size.time(drafts) is not None]
        return min(found, key=lambda b: (abs(b - bits), -b), default=None)

    def _time(self, bits: int, drafts: int) -> float | None:
        """Seconds of a step, seen or guessed."""
        size = self._sizes.get(bits)
        seen = None if size is None else size.time(drafts)
        near = self._nearest(bits, drafts)
        if seen is not None or near is None:
            return seen
        there = self._sizes[near]
        found = there.time(drafts)
        assert found is not None
        for other in sorted(self._choices, key=lambda n: abs(n - drafts)):
            here = None if size is None else size.time(other)
            beside = there.time(other)
            if here is not None and beside is not None:
                return here * found / beside
        return found

    def tokens(self, drafts: int) -> float:
        """Tokens that a request is expected to get of a step."""
        total, alive = 1.0, 1.0
        for depth in range(min(drafts, self._shape.steps)):
            alive *= (self._right[depth] + 1) / (self._tried[depth] + 2)
            total += alive
        return total

    def _rate(self, bits: int, drafts: int) -> float | None:
        """Tokens of a request per second, with what is known."""
        time = self._time(bits, drafts)
        return None if time is None else self.tokens(drafts) / time

    def note(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """A step's results are here, at `now` seconds."""
        last, self._last = self._last, None
        outcomes = Counter(
            (len(outcome.tokens) - 1, work.length - 1)
            for work, outcome in zip(plan.works, result.works, strict=True)
            if work.tokens is None and work.length > 1
        )
        for (right, drafted), times in outcomes.items():
            self._outcome(right, min(drafted, self._shape.steps), times)
        if any(w.tokens is not None for w in plan.works):
            return
        bits = len(plan.works).bit_length()
        self._last = now, bits, plan.drafts
        verified = max(w.length for w in plan.works) - 1
        # Where the number of drafts has just changed, a step verifies another than it drafts.
        if last is not None and last[1:] == (bits, plan.drafts) and verified == plan.drafts:
            times_ = self._sizes.setdefault(bits, _Size()).times
            times_.setdefault(plan.drafts, deque(maxlen=_SAMPLES)).append(now - last[0])

    def _outcome(self, right: int, depth: int, times: int) -> None:
        """Of so many requests `right` of `depth` drafts were right."""
        for i in range(min(depth, right + 1)):
            self._tried[i] += times
            self._right[i] += times * (right > i)
            if self._tried[i] > _MEMORY:
                self._tried[i] /= 2
                self._right[i] /= 2
