"""Answers that are kept for a while, with the conversation up to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

KEPT = 1024  # answers
_KEPT_BYTES = 64 << 20
_Name = tuple[str, str]  # whose, and its id


@dataclass(slots=True)
class _Share:
    """What one client has kept: the names, oldest first, and their bytes."""

    names: OrderedDict[_Name, None]
    num_bytes: int = 0

    @property
    def part(self) -> float:
        """Of all that there is room for."""
        return max(len(self.names) / KEPT, self.num_bytes / _KEPT_BYTES)


class Kept:
    """Answers that may be asked for again, and the conversation up to them.

    Where they become too many, whoever keeps the most loses his oldest one, and `dropped` is
    called. Nobody loses any as long as he keeps no more than an equal share.
    """

    def __init__(self, dropped: Callable[[], None] = lambda: None) -> None:
        self._dropped = dropped
        self._answers: dict[_Name, tuple[str, bytes, bytes]] = {}  # with whose share they count to
        self._shares: dict[str, _Share] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def shelf(self, owner: str, share: str) -> Shelf:
        """What `owner` sees. What is put there counts to `share`."""
        return Shelf(self, owner, share)

    def put(self, name: _Name, share: str, answer: Any, history: Any) -> None:
        """Keep an answer and what a next request continues from, both as JSON would have them."""
        self.drop(name)
        entry = share, msgspec.json.encode(answer), msgspec.json.encode(history)
        self._answers[name] = entry
        mine = self._shares.setdefault(share, _Share(OrderedDict()))
        mine.names[name] = None
        self._count(mine, entry)
        while len(self._answers) > KEPT or self.num_bytes > _KEPT_BYTES:
            most = max(self._shares.values(), key=lambda one: one.part)
            self.drop(next(iter(most.names)))
            self._dropped()

    def drop(self, name: _Name) -> None:
        """Forget an answer, if it is there."""
        if (entry := self._answers.pop(name, None)) is None:
            return
        share = self._shares[entry[0]]
        del share.names[name]
        self._count(share, entry, -1)
        if not share.names:
            del self._shares[entry[0]]

    def _count(self, share: _Share, entry: tuple[str, bytes, bytes], sign: int = 1) -> None:
        size = sign * (len(entry[1]) + len(entry[2]))
        share.num_bytes += size
        self.num_bytes += size

    def get(self, name: _Name) -> tuple[bytes, bytes] | None:
        """An answer and what continues from it, as JSON; None if it is not kept."""
        entry = self._answers.get(name)
        return None if entry is None else entry[1:]


class Shelf:
    """One caller's answers, by id: those of others are not there."""

    def __init__(self, kept: Kept, owner: str, share: str) -> None:
        self._kept, self._owner, self._share = kept, owner, share

    def put(self, name: str, answer: Any, history: Any) -> None:
        """Keep an answer and what a next request continues from."""
        self._kept.put((self._owner, name), self._share, answer, history)

    def drop(self, name: str) -> None:
        """Forget an answer, if it is there."""
        self._kept.drop((self._owner, name))

    def answer(self, name: str) -> bytes | None:
        """The answer as JSON; None if it is not kept."""
        entry = self._kept.get((self._owner, name))
        return None if entry is None else entry[0]

    def history(self, name: str) -> Any:
        """What a next request continues from; None if it is not kept."""
        entry = self._kept.get((self._owner, name))
        return None if entry is None else msgspec.json.decode(entry[1])
