"""Answers that are kept for a while, with the conversation up to them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

KEPT = 1024  # answers
_KEPT_BYTES = 64 << 20


class Kept:
    """Answers that may be asked for again, and the conversation up to them; oldest out first."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._bytes = 0

    def put(self, name: str, answer: Any, history: Any) -> None:
        """Keep an answer and what a next request goes on from, both as JSON would have them."""
        self.drop(name)
        entry = msgspec.json.encode(answer), msgspec.json.encode(history)
        self._answers[name] = entry
        self._bytes += sum(map(len, entry))
        while len(self._answers) > KEPT or self._bytes > _KEPT_BYTES:
            self.drop(next(iter(self._answers)))

    def drop(self, name: str) -> None:
        """Forget an answer, if it is there."""
        entry = self._answers.pop(name, None)
        self._bytes -= sum(map(len, entry or ()))

    def answer(self, name: str) -> bytes | None:
        """The answer as JSON; None if it is not kept."""
        return None if (entry := self._answers.get(name)) is None else entry[0]

    def history(self, name: str) -> Any:
        """What a next request goes on from; None if it is not kept."""
        entry = self._answers.get(name)
        return None if entry is None else msgspec.json.decode(entry[1])
