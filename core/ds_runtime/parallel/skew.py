"""Which rank comes last to the collectives of a step, and by how much; and which does not come."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection
from typing import Protocol

_PENDING = 64  # steps of which not every rank has told
_TELLING = 1.0  # seconds: ranks that came to a collective together give up together


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


class Board(Protocol):
    """What all ranks write to and read: a Store of torch.distributed."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...


def absent(board: Board, rank: int, ranks: Collection[int]) -> list[int]:
    """Say that this rank has waited for others too long. Returns those of `ranks` that do not say
    so, too, within a second, by their numbers: one of them at least is the one that all wait for.
    A rank that came late gives up late, and may be among them. Returns none where the board does
    not answer, as where the process that has it is stopped.
    """
    keys = {other: f"ds-runtime/gave-up/{other}" for other in {rank, *ranks}}
    left: set[int] | None = None

    def ask() -> None:
        nonlocal left
        missing, deadline = {*keys} - {rank}, time.monotonic() + _TELLING
        with contextlib.suppress(RuntimeError):  # the board is gone
            board.set(keys[rank], "")
            while missing and time.monotonic() < deadline:
                missing -= {other for other in missing if board.check([keys[other]])}
                time.sleep(0.02)
            left = missing

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * _TELLING)
    return sorted(left or ())
