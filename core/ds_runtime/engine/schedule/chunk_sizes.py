"""How much of prompts a step carries, so that those who decode get their next token in time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ds_runtime.engine.messages import Stats
from ds_runtime.engine.schedule.limits import SchedulerLimits
from ds_runtime.engine.schedule.step_cost import Load, StepCost
from ds_runtime.engine.step.plan import StepPlan
from ds_runtime.ops.contracts.attention.absorbing import Absorbing

_LEAST = 32  # tokens of a prompt that a step computes in any case
_FADES = 0.1  # share of the last step in the mean of steps without prompts
_WITHIN = 0.9  # share of the steps with decodes and prompts that shall take no longer than asked
_MOVES = 0.05  # of `over`, by one step
_MOST_OVER = 1.5


class Sizing:
    """Chunks for a gap of `gap` seconds between tokens. max_tokens: most of a step; chunk: of one
    prompt in it; sizes: tokens of the steps with prompts that are captured, rising; absorbing:
    which chunks attend as decode does.

    A gap of 0 limits nothing. Where nobody decodes, the first prompt of a step is not limited.
    Others join it for as long as the step takes no longer than one of `max_tokens` without anything
    cached.
    """

    def __init__(
        self,
        gap: float,
        max_tokens: int,
        chunk: int,
        sizes: Sequence[int] = (),
        absorbing: Absorbing | None = None,
    ) -> None:
        self.gap, self.sizes, self._absorbing = gap, sizes, absorbing
        self.share = min(1.0, chunk / max_tokens)  # of a step, for one prompt of several
        self.cost = StepCost()
        self.decode = 0.0  # mean seconds of steps without prompts
        self.over = 1.0  # times what is expected, that all but a few steps stay within
        self._full = Load()
        for _ in range(max(1, max_tokens // chunk)):
            self._full.add_prompt(0, min(chunk, max_tokens))

    @classmethod
    def of(cls, limits: SchedulerLimits) -> Sizing:
        """As an engine's limits have it."""
        most, chunk = limits.max_step_tokens, limits.prefill_chunk
        return cls(limits.max_itl, most, chunk, limits.prefill_sizes, limits.absorbing)

    def absorbs(self, start: int, length: int) -> bool:
        """Whether `length` tokens of a prompt after `start` cached ones attend as decoded ones."""
        return self._absorbing is not None and self._absorbing.pays(start, length)

    def open(self, plan: StepPlan) -> StepRoom:
        """The room for prompts next to the decode works of a plan."""
        load = Load()
        for work in plan.works:
            load.rows += work.length + plan.drafts
            load.context += work.start
        if not (self.gap and self.cost.known):
            return StepRoom(self, load, None)
        if not load.rows:
            return StepRoom(self, load, self.cost.seconds(self._full) - self.cost.seconds(load))
        taken = max(self.cost.seconds(load), self.decode)
        return StepRoom(self, load, max(self.gap, 2 * self.decode) / self.over - taken)

    def note(self, room: StepRoom, seconds: float, stats: Stats) -> None:
        """The step that a room was opened for took so long."""
        load = room.load
        if not load.prompts:
            if load.rows:
                clipped = min(seconds, 3 * self.decode) if self.decode else seconds
                self.decode += (clipped - self.decode) * (_FADES if self.decode else 1.0)
            return
        stats.prefill_steps += 1
        stats.prefill_tokens += load.tokens
        stats.prefill_absorbed += load.absorbed_tokens
        stats.prefill_steps_cut += room.is_cut
        if self.cost.known:
            expected = self.cost.seconds(load)
            stats.prefill_seconds += seconds
            stats.prefill_seconds_expected += expected
            if load.rows:
                moved = _WITHIN if seconds > self.over * expected else _WITHIN - 1.0
                self.over = min(max(self.over + _MOVES * moved, 1.0), _MOST_OVER)
        self.cost.note(load, seconds)


class StepRoom:
    """What prompts may take of one step. `seconds`: left for them; None: nothing is known yet."""

    def __init__(self, sizing: Sizing, load: Load, seconds: float | None) -> None:
        self.load, self.is_cut, self.is_full = load, False, False
        self._sizing, self._seconds = sizing, seconds

    def take(self, start: int, most: int, others: bool) -> int:
        """Tokens of a prompt's next chunk, after `start` that are cached: `most`, fewer, or none
        where the step is full. others: more prompts wait after it.
        """
        length = most
        if self._seconds is not None:
            length = self._fitting(start, most, others, self._seconds)
        if length < most:
            self.is_cut = True
        if not length:
            self.is_full = True
            return 0
        before = self._sizing.cost.seconds(self.load)
        self.load.add_prompt(start, length, self._sizing.absorbs(start, length))
        if self._seconds is not None:
            self._seconds -= self._sizing.cost.seconds(self.load) - before
        return length

    def _fitting(self, start: int, most: int, others: bool, seconds: float) -> int:
        cost, load = self._sizing.cost, self.load
        first = not load.prompts
        if first and not load.rows:
            return most
        absorbed = self._sizing.absorbs(start, most)  # as fewer tokens are then
        length = cost.chunk(start, seconds, absorbed)
        if length >= most and not (first and others):
            return most
        if first and others:  # as the two limits on tokens share a step among prompts
            length = min(
                length, max(cost.chunk(start, seconds * self._sizing.share, absorbed), _LEAST)
            )
        if first:
            length = max(length, _LEAST, cost.least(start, absorbed))
        elif length < min(most, _LEAST):
            return 0
        return self._rounded(int(min(length, most)), most)

    def _rounded(self, length: int, most: int) -> int:
        """Where a prompt is cut, a captured step is filled."""
        if length >= most:
            return most
        before = self.load.rows + self.load.tokens
        number = bisect_right(self._sizing.sizes, before + length)
        filled = self._sizing.sizes[number - 1] - before if number else 0
        return filled if filled >= _LEAST else length
