"""How long an engine has to close: as long as it may write to a disk, and no longer than asked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from ds_runtime.config import ServerConfig
from ds_runtime.server.engines.restarts import Lives
from ds_runtime.server.engines.supervisor import Keeper

MINUTE = 60.0


class Closing:
    """An engine that writes for so many seconds once it is told to leave, and may be killed."""

    to_engine = from_engine = "ipc://nobody"

    def __init__(self, seconds: float) -> None:
        self.seconds, self.killed = seconds, threading.Event()
        self.given: list[float] = []

    def start(self) -> None:
        pass

    def poll(self) -> None:
        return None

    def stop(self, timeout: float = 5.0) -> str | None:
        self.given.append(timeout)
        if not self.killed.wait(min(timeout, self.seconds)) and timeout < self.seconds:
            self.killed.set()
        return None


class Client:
    """Of an engine that is ready, or never is."""

    dead = restarting = None

    def __init__(self, ready: bool) -> None:
        self.ready, self.awaits, self.heard = ready, False, 0

    async def wait(self) -> None:
        await (asyncio.sleep(0) if self.ready else asyncio.Event().wait())

    async def wait_dead(self) -> None:
        await asyncio.Event().wait()


def closed(engine: Closing, ready: bool, writes: float, again: float | None) -> tuple[bool, float]:
    """Whether it is said to have closed well, and seconds. again: when a second signal comes."""

    async def run() -> tuple[bool, float]:
        lives = Lives(lambda folder: engine, ServerConfig())
        keeper = Keeper(lives, Client(ready), "", 0.0, lambda: None, writes)
        keeping, hurried = asyncio.create_task(keeper.run()), asyncio.Event()
        await asyncio.sleep(0.1)
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        if again == 0.0:
            hurried.set()
        elif again is not None:
            asyncio.get_running_loop().call_later(again, hurried.set)
        begin = time.monotonic()
        return await keeper.stop(hurried), time.monotonic() - begin

    return asyncio.run(run())


@pytest.mark.parametrize("again", [None, 0.0, 0.3])
@pytest.mark.parametrize("writes", [0.0, MINUTE])
@pytest.mark.parametrize("ready", [False, True])
def test_an_engine_that_serves_has_the_time_that_its_disk_takes(ready, writes, again):
    engine = Closing(4.0)
    well, took = closed(engine, ready, writes, again)
    waits = ready and writes > 0 and again is None
    assert well and engine.killed.is_set() != waits
    assert (took >= 4.0) == waits and took < 8.0
    assert again is None or took < 2.0, "a second signal is answered at once"
    if again != 0.0:
        assert engine.given[0] == pytest.approx(2.0 + (writes if ready else 0.0))
