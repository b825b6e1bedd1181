"""The engine's replicas behind one server: who gets a request, and what is meant for all."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_runtime.engine.messages import Ready, Stats, SubmitGroup
from ds_runtime.errors import EngineDeadError, RequestError
from ds_runtime.server.engines.client import EngineClient, Flight
from ds_runtime.server.errors import DrainingError, NotReadyError

_BLOCK = 64  # tokens
_BLOCKS = 128  # of a prompt that are looked at
_KNOWN = 1 << 16  # blocks, over all prompts
_SLACK = 8  # choices more than the least that a replica may have and still be sent what it knows


class Replicas:
    """One or more engines that serve the same model. `clients` are theirs, by number.

    A prompt goes to the replica with the fewest choices under way; to one that has seen its
    beginning, as long as that has not many more.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients = tuple(clients)
        self._adapted: dict[str, str | None] = {}
        for client in self.clients:
            client.adapted = self._adapted
        self._adapting = asyncio.Lock()
        self._beginnings = _Beginnings()
        self._sent = [0] * len(self.clients)
        self.draining = False

    async def start(self) -> None:
        """Open the sockets. Call it before the engines start, so that no message is lost."""
        for client in self.clients:
            await client.start()

    def drain(self) -> None:
        """Take no request any more."""
        self.draining = True
        for client in self.clients:
            client.draining = True

    def end(self) -> None:
        """The server leaves: whoever still waits is told so."""
        self.draining = True
        for client in self.clients:
            client.end()

    def close(self) -> None:
        """Abort what runs and close the sockets. May be called twice."""
        for client in self.clients:
            client.close()

    @property
    def ready(self) -> Ready | None:
        """Facts of an engine that has been loaded; they are those of all."""
        return next((c.ready for c in self.clients if c.ready is not None), None)

    @property
    def serving(self) -> list[EngineClient]:
        """Those that take requests."""
        return [client for client in self.clients if client.serves]

    def require(self) -> Ready:
        """A serving engine's facts; EngineDeadError or NotReadyError when there is none."""
        reasons = list[EngineDeadError | NotReadyError]()
        for client in self.clients:
            try:
                return client.require()
            except (EngineDeadError, NotReadyError) as e:
                reasons.append(e)
            except DrainingError as e:
                raise e from None
        raise min(reasons, key=lambda e: isinstance(e, EngineDeadError))  # one may come back

    def open(self, groups: Sequence[SubmitGroup]) -> Flight:
        """Send the choices of one request: all of them, or none if this raises."""
        if self.draining:
            raise DrainingError("the server is shutting down and takes no more requests")
        self.require()
        flight = Flight()
        try:
            for group in groups:
                number = self._choose(group)
                self._sent[number] += 1
                self.clients[number].submit(group, flight)
        except BaseException:
            flight.close()
            raise
        return flight

    def _choose(self, group: SubmitGroup) -> int:
        able = [n for n, c in enumerate(self.clients) if c.serves]
        having = [n for n in able if not group.adapter or group.adapter in self.clients[n].adapters]
        able = having or able  # the engine's own words for an adapter that has just gone
        if len(self.clients) == 1:
            return able[0]
        number = min(able, key=lambda n: (self.clients[n].load, self._sent[n]))
        keys = list(self._beginnings.keys(group))
        known = self._beginnings.find(keys)
        if known is not None and known[0] in able:
            limit = self.clients[number].load * 3 // 2 + _SLACK
            if self.clients[known[0]].restarts == known[1] and self.clients[known[0]].load <= limit:
                number = known[0]
        self._beginnings.put(keys, (number, self.clients[number].restarts))
        return number

    def health(self) -> dict[str, Any]:
        """`status`, which is "ok" as long as one engine serves, and what is wrong with others."""
        if self.draining:
            return {"status": "draining"}
        each = [client.health for client in self.clients]
        down = {str(n): found for n, found in enumerate(each) if found["status"] != "ok"}
        if len(down) < len(each):
            return {"status": "ok"} | ({"down": down} if down else {})
        order = ("restarting", "starting", "dead")
        return min(down.values(), key=lambda found: order.index(found["status"]))

    @property
    def stats(self) -> Stats:
        """Counters and gauges of all engines, summed."""
        each = [client.stats for client in self.clients]
        return Stats(**{f: _total([getattr(s, f) for s in each]) for f in Stats.__struct_fields__})

    @property
    def adapters(self) -> list[str]:
        """Names that at least one engine has loaded."""
        return list(dict.fromkeys(name for c in self.clients for name in c.adapters))

    async def flush(self) -> int:
        """Empty the prefix caches; pages freed."""
        self.require()
        self._beginnings = _Beginnings()
        return sum(await asyncio.gather(*(client.flush() for client in self.serving)))

    async def profile(self, folder: str | None) -> str:
        """As `EngineClient.profile`, of the first replica."""
        return await self.clients[0].profile(folder)

    async def adapt(self, name: str, folder: str | None) -> None:
        """Load the adapter in `folder` under a name everywhere, or with None unload it.

        RequestError when one engine refuses; what others have loaded is unloaded again then. An
        engine that is on its way, or falls meanwhile, gets it when it is there.
        """
        async with self._adapting:
            self.require()
            asked = self.serving
            answers = await asyncio.gather(
                *(client.adapt(name, folder) for client in asked), return_exceptions=True
            )
            wrong = [a for a in answers if isinstance(a, BaseException)]
            fallen = [a for a in wrong if isinstance(a, EngineDeadError)]
            if len(fallen) < len(wrong) or len(fallen) == len(asked):
                for client, answer in zip(asked, answers, strict=True):
                    if answer is None and folder is not None:
                        client.tell_adapter(name, None)
                raise next((a for a in wrong if isinstance(a, RequestError)), wrong[0])
            self._adapted[name] = folder
            for client in self.clients:
                if client not in asked and client.ready is not None and client.dead is None:
                    client.tell_adapter(name, folder)


def _total(each: Sequence[Any]) -> Any:
    """The sum of numbers, or of numbers by name."""
    if isinstance(each[0], Mapping):
        return dict(sum(map(Counter, each), Counter()))
    return sum(each)


class _Beginnings:
    """Which replica, in which of its lives, was last sent what begins so. Oldest out first."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def keys(self, group: SubmitGroup) -> Iterator[int]:
        """A number per block of the prompt, for everything up to its end, under its salt."""
        prompt, key = group.prompt, hash((group.adapter, group.salt))
        for end in range(_BLOCK, min(len(prompt), _BLOCK * _BLOCKS) + 1, _BLOCK):
            key = hash((key, *prompt[end - _BLOCK : end]))
            yield key

    def find(self, keys: Sequence[int]) -> tuple[int, int] | None:
        """Who knows the most of it."""
        return next((found for k in reversed(keys) if (found := self._known.get(k))), None)

    def put(self, keys: Sequence[int], replica: tuple[int, int]) -> None:
        """It is sent there now."""
        for key in keys:
            self._known[key] = replica
            self._known.move_to_end(key)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
