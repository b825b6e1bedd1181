"""A disk that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Hangs:
    """A method of a folder from now on: calls wait for `release`, then do what the method did.

    waits: of which calls, numbered from 1 on (default: all). begun: their first arguments.
    """

    def __init__(
        self, folder: Any, method: str, waits: Callable[[int], bool] = lambda number: True
    ) -> None:
        self.begun = list[bytes]()
        self.release = threading.Event()
        self._does, self._waits = getattr(folder, method), waits
        setattr(folder, method, self)

    def __call__(self, name: bytes, *given: Any) -> Any:
        self.begun.append(name)
        if self._waits(len(self.begun)):
            self.release.wait(60)
        return self._does(name, *given)
