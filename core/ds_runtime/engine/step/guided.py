"""Results of requests that a grammar guides: taken once their guides are behind the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_runtime.engine.schedule.request import Request
from ds_runtime.engine.step.plan import Work, WorkResult
from ds_runtime.grammar.followers import Followers, Following


@dataclass(eq=False, slots=True)
class Guided:
    """One request's result, and its guide on its way."""

    request: Request
    work: Work
    outcome: WorkResult
    following: Following

    @staticmethod
    def of(request: Request, work: Work, outcome: WorkResult) -> Guided:
        """A result that has just come."""
        assert request.guide is not None
        ahead = (outcome.tokens, outcome.drafts, outcome.draft_parents)
        return Guided(request, work, outcome, Following(request.guide, *ahead))


class Underway:
    """Results that are not taken yet. Those of guides that are late keep nobody else waiting."""

    def __init__(self) -> None:
        self._followers = Followers()
        self._guided: list[Guided] = []

    def begin(self, fresh: Sequence[Guided]) -> int:
        """Let guides follow, and wait for the quick ones; how many are late."""
        for one in fresh:
            one.request.is_following = True
        following = [one.following for one in fresh]
        self._followers.begin(following)
        self._followers.wait(following)
        self._guided += fresh
        return sum(one.found is None for one in following)

    def ready(self, seconds: float) -> list[Guided]:
        """Those that are there, out of here; `seconds` to wait for the first."""
        if not self._guided:
            return []
        if seconds:
            self._followers.wait_any([one.following for one in self._guided], seconds)
        # Looked at once: a thread may be done at any time.
        there = [one for one in self._guided if one.following.found is not None]
        gone = set(map(id, there))
        self._guided = [one for one in self._guided if id(one) not in gone]
        for one in there:
            one.request.is_following = False
        return there

    def close(self) -> None:
        """Let the threads of guides leave."""
        self._followers.close()
