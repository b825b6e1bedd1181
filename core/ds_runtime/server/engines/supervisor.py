"""One engine kept alive: started, watched, and started again where it falls or hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ds_runtime.server.engines.client import EngineClient
from ds_runtime.server.engines.restarts import Lives, RunningEngine

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_LAST_WORDS = 0.5  # seconds for a dying engine's own message to arrive before poll's reason counts
_TRACE_SECONDS = 0.2  # for a hanging engine's threads to say where they are
_STOP_SECONDS = 2.0
_AT_ONCE = 0.1
_LONGEST_TICK = 1.0  # seconds of silence that one look may add: this process may have slept


@dataclass(frozen=True, slots=True)
class End:
    """An engine that will not be started again, and whether it ever served."""

    reason: str
    served: bool


class Watchdog:
    """Tells an engine that hangs: it owes answers and sends nothing for `timeout` s (0: never)."""

    def __init__(self, client: EngineClient, timeout: float) -> None:
        self._client, self._timeout = client, timeout
        self._heard, self._silent = client.heard, 0.0
        self._looked = time.monotonic()

    def hangs(self) -> bool:
        """To be asked several times a second."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_TICK), now
        if self._heard != self._client.heard or not self._client.awaits:
            self._heard, self._silent = self._client.heard, 0.0
        else:
            self._silent += passed
        return 0.0 < self._timeout < self._silent


class Keeper:
    """Runs one replica's lives. `name`: what its lines begin with, "" where there is one replica.

    `told`: called whenever its engine has become ready. `writes`: seconds for which an engine that
    closes may write to a disk.
    """

    def __init__(
        self,
        lives: Lives,
        client: EngineClient,
        name: str,
        patience: float,
        told: Callable[[], None],
        writes: float = 0.0,
    ) -> None:
        self.lives, self._writes = lives, writes
        self._client, self._name, self._told = client, name, told
        self._patience = patience
        self._fallen = False  # and everybody was told why
        self._serves = False
        client.outlook = lives.outlook

    async def run(self) -> End:
        """Until it is not to be started again."""
        served = False
        while True:
            self._fallen = self._serves = False
            self.lives.start()
            watch = asyncio.create_task(self._watch(self.lives.engine))
            try:
                served = await self._live() or served
            finally:
                watch.cancel()
            self._fallen = True
            reason = f"{self._name}{self._client.dead}"
            if not served or not self.lives.may_go_on():
                self._client.restarting = None
                return End(reason, served)
            await self._restart(reason)

    async def _live(self) -> bool:
        """Until the engine is dead; whether it was ready before."""
        client = self._client
        await client.wait()
        if client.dead is not None:
            return False
        self.lives.ready()
        self._serves = True
        client.restarting = None
        self._told()
        await client.wait_dead()
        return True

    async def _restart(self, reason: str) -> None:
        """Start the next engine after a while."""
        delay = self.lives.delay()
        said = f"{reason}; {self.lives.plan()}"
        _log.error("the engine has stopped: %s in %g s", said, delay)
        self._client.restarting = said
        await self._stop(_STOP_SECONDS)
        await asyncio.sleep(delay)
        engine = self.lives.renew()
        self._client.renew(engine.to_engine, engine.from_engine)

    async def stop(self, hurried: asyncio.Event) -> bool:
        """End the engine's processes, at once where that is set; whether they closed well, or it
        was known why not."""
        seconds = _STOP_SECONDS + (self._writes if self._serves and not self._fallen else 0.0)
        ending = asyncio.create_task(self._stop(_AT_ONCE if hurried.is_set() else seconds))
        asked = asyncio.create_task(hurried.wait())
        await asyncio.wait({ending, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not ending.done():
            await asyncio.to_thread(self.lives.stop, 0.0)
        reason = await ending
        if self._fallen or reason is None:
            return True
        _log.error("%sthe engine failed while it closed: %s", self._name, reason)
        return False

    async def _stop(self, seconds: float) -> str | None:
        """In a thread, and to its end: nobody else may wait for the same processes meanwhile."""
        ending = asyncio.create_task(asyncio.to_thread(self.lives.stop, seconds))
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def _watch(self, engine: RunningEngine) -> None:
        """Turns the end of a process, or its silence, into the client's reason."""
        dog = Watchdog(self._client, self._patience)
        while (reason := engine.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
            if dog.hangs():
                engine.trace()
                await asyncio.sleep(_TRACE_SECONDS)
                reason = f"it hangs: no sign for {self._patience:g} s (--watchdog-timeout)"
                self._client.fail(reason)
                return
        await asyncio.sleep(_LAST_WORDS)
        self._client.fail(reason)
