"""Which rank comes last to the collectives of a step, and by how much."""

from __future__ import annotations

_PENDING = 64  # steps of which not every rank has told


class Skew:
    """Of an engine, from the seconds that each rank waited for the others in a step. Whoever waited
    longest came first, and each other rank was late by what it waited less.

    ranks: their number. steps: those of which every rank has told. seconds: by which the last rank
    was late, summed over them. late: the same of each rank, by its number.
    """

    def __init__(self, ranks: int) -> None:
        self.steps, self.seconds = 0, 0.0
        self.late = dict.fromkeys(range(ranks), 0.0)
        self._pending: dict[int, dict[int, float]] = {}

    def note(self, rank: int, step: int, waited: float) -> None:
        """A rank waited `waited` seconds in the step of this number."""
        told = self._pending.setdefault(step, {})
        told[rank] = waited
        if len(told) == len(self.late):
            del self._pending[step]
            longest = max(told.values())
            self.steps += 1
            self.seconds += longest - min(told.values())
            for one, own in told.items():
                self.late[one] += longest - own
        elif len(self._pending) > _PENDING:
            del self._pending[min(self._pending)]
