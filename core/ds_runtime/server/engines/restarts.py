"""The engine's lives, each in a private folder of its own: nothing of one reaches the next."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ds_runtime.config import ServerConfig
from ds_runtime.engine.process.transport import private_folder

_FIRST_DELAY = 0.5  # seconds before the first restart; doubled for each that follows
_LONGEST_DELAY = 30.0
_LONG_LIFE = 600.0  # seconds of serving after which the restarts before it are forgotten


class RunningEngine(Protocol):
    """The engine's processes, as `engine.launch.EngineProcesses` runs them."""

    to_engine: str
    from_engine: str

    def start(self) -> None:
        """Start the processes; they answer with Ready or Dead."""
        ...

    def poll(self) -> str | None:
        """Why a process ended, or None while all live."""
        ...

    def trace(self) -> None:
        """Have the processes write where their threads are."""
        ...

    def stop(self, timeout: float = ...) -> str | None:
        """End every process within `timeout` seconds. Why they failed in closing, if one did."""
        ...


class Lives:
    """Makes engines, one at a time, and says whether there may be another.

    `launch` makes one for a folder and starts nothing. Close it when the last has stopped.
    """

    def __init__(self, launch: Callable[[Path], RunningEngine], config: ServerConfig) -> None:
        self._launch = launch
        self._limit = config.max_engine_restarts if config.on_engine_death == "restart" else 0
        self._folder = contextlib.ExitStack()
        self._ready_at: float | None = None
        self._started = False
        self.restarts = 0
        self.engine = self._make()

    def _make(self) -> RunningEngine:
        self._folder.close()
        self._started = False
        return self._launch(self._folder.enter_context(private_folder()))

    def start(self) -> None:
        """Start the engine's processes, unless they are started."""
        if not self._started:
            self._started = True
            self.engine.start()

    def stop(self, timeout: float) -> str | None:
        """End the engine's processes, as `RunningEngine.stop`."""
        said = self.engine.stop(timeout)
        self._started = False
        return said

    def abandon(self) -> None:
        """End the engine's processes at once, if they were started and not stopped."""
        if self._started:
            self.stop(0.0)

    def ready(self) -> None:
        """The engine serves from now on."""
        self._ready_at = time.monotonic()

    def may_go_on(self) -> bool:
        """Whether a death is followed by a restart."""
        return self._counted() < self._limit

    def outlook(self) -> str:
        """What follows a death, for those whose requests it ended."""
        return "the server restarts it: try again" if self.may_go_on() else "the server exits"

    def delay(self) -> float:
        """Count a restart; seconds to wait before it."""
        self.restarts, self._ready_at = self._counted() + 1, None
        return min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (self.restarts - 1))

    def plan(self) -> str:
        """The restart that was counted last, for the operator."""
        return f"restart {self.restarts} of {self._limit}"

    def renew(self) -> RunningEngine:
        """The next engine; the last must have stopped."""
        self.engine = self._make()
        return self.engine

    def close(self) -> None:
        """Remove the folder."""
        self._folder.close()

    def _counted(self) -> int:
        lived = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        return 0 if lived >= _LONG_LIFE else self.restarts
