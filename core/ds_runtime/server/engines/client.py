"""The front end's end of the sockets: submit, receive, abort, flush, profile, adapters."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import zmq

from ds_runtime.engine.messages import (
    Abort,
    Adapt,
    Adapted,
    Answer,
    Dead,
    Failed,
    Flush,
    Flushed,
    FromEngine,
    Profile,
    Profiled,
    Ready,
    Stats,
    SubmitGroup,
    ToEngine,
    Tokens,
    decode_from_engine,
    encoder,
)
from ds_runtime.engine.process.transport import bind_pull, connect_push
from ds_runtime.errors import DsRuntimeError, EngineDeadError, RequestError
from ds_runtime.kv.transfer.asked import HoldPages, PagesHeld, PagesPulled, PullPages
from ds_runtime.server.errors import DrainingError, NotReadyError
from ds_runtime.server.http.turns import Turns, joined

_LEAVING = "the server is shutting down"
_DRAIN = 256  # steps' messages handled before other callbacks of the event loop get a turn


class Flight:
    """The choices of one client request inside the engine. Close it, and what runs is aborted."""

    def __init__(self) -> None:
        self._running: dict[str, EngineClient] = {}
        self._came: deque[Tokens | Exception] = deque()
        self._awaited: asyncio.Future[None] | None = None

    async def next(self) -> Tokens:
        """The next tokens of any choice, in order per choice.

        Raises QueueFullError or RequestError as the engine refuses, LogitsError where one choice
        cannot continue, EngineDeadError when the engine dies.
        """
        while not self._came:
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited
        item = self._came.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def drop(self, rid: str) -> None:
        """Abort one choice that has its text already."""
        client = self._running.pop(rid, None)
        if client is not None:
            client.forget([rid], abort=True)

    def abort(self, rids: Iterable[str] | None = None) -> None:
        """End what runs here and in the engine, of these or of all: it finishes with "abort" and
        the text so far."""
        for rid in sorted(self._running if rids is None else self._running.keys() & {*rids}):
            self.drop(rid)
            self._hand_over(Tokens(rid=rid, tokens=[], finish="abort"))

    def close(self) -> None:
        """Abort everything that has not finished. May be called twice."""
        running, self._running = self._running, {}
        for client in set(running.values()):
            client.forget([rid for rid, its in running.items() if its is client], abort=True)

    def add(self, rids: Iterable[str], client: EngineClient) -> None:
        """For the client: these choices are its."""
        self._running.update(dict.fromkeys(rids, client))

    def put(self, message: Tokens | Exception, gathers: bool = False) -> None:
        """For the client: hand over one message. gathers: as one with what was not taken yet."""
        if isinstance(message, Tokens) and message.finish is not None:
            self._running.pop(message.rid, None)
        self._hand_over(message, gathers)

    def _hand_over(self, message: Tokens | Exception, gathers: bool = False) -> None:
        last = self._came[-1] if gathers and self._came else None
        if (
            isinstance(message, Tokens)
            and isinstance(last, Tokens)
            and (last.rid, last.finish) == (message.rid, None)
        ):
            self._came[-1] = joined(last, message)
        else:
            self._came.append(message)
        awaited, self._awaited = self._awaited, None
        if awaited is not None and not awaited.done():
            awaited.set_result(None)

    def lose(self, rid: str) -> None:
        """For the client: the engine refused this choice; there is nothing to abort."""
        self._running.pop(rid, None)


class EngineClient:
    """Talks to one engine: PUSH to `to_engine` (the engine binds), PULL on `from_engine` (bound
    here). Everything happens on the event loop that called `start`.

    `think_id`: the token from which on output stays out of the prefix cache; None keeps all.
    `adapted`: what was loaded since the start, by name, and with None unloaded; an engine that is
    restarted is brought to it. `ready` is None while the engine loads; `dead` holds the reason once
    it is gone, and `outlook` tells what then happens. `restarting`: why another is on its way.
    `draining`: the server takes no request any more. `adapters`: the names of those that are
    loaded. `heard` counts messages. `turns`: how often they are taken.
    """

    def __init__(self, to_engine: str, from_engine: str, think_id: int | None = None) -> None:
        self._think_id = think_id
        self._to_engine, self._from_engine = to_engine, from_engine
        self.ready: Ready | None = None
        self.dead: str | None = None
        self.outlook: Callable[[], str] | None = None
        self.restarting: str | None = None
        self.draining = False
        self.stats = Stats()
        self.restarts = 0
        self.adapters: list[str] = []
        self.heard = 0
        self.adapted: dict[str, str | None] = {}
        self.turns = Turns()
        self._turn: asyncio.TimerHandle | None = None  # the next, where one waits for it
        self._changed = asyncio.Event()
        self._flights: dict[str, Flight] = {}
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    async def start(self) -> None:
        """Open the sockets. Call it before the engine starts, so that no message is lost."""
        self._loop = asyncio.get_running_loop()
        self._open()

    def renew(self, to_engine: str, from_engine: str) -> None:
        """Turn to another engine, which loads, after the last has died."""
        assert self.dead is not None, "the last engine lives"
        self._close()
        self._to_engine, self._from_engine = to_engine, from_engine
        self.ready, self.dead, self.stats = None, None, Stats()
        self.restarts += 1
        self._open()

    def _open(self) -> None:
        self._context = zmq.Context()
        self._pull = bind_pull(self._context, self._from_engine)
        self._push = connect_push(self._context, self._to_engine)
        self._fd = int(self._pull.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Abort what runs and close the sockets. May be called twice."""
        self.end()
        self._close()

    def _close(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            self._loop.remove_reader(self._fd)
            if self._turn is not None:
                self._turn.cancel()
                self._turn = None
            context.destroy()

    async def wait(self) -> None:
        """Until the engine is ready or dead."""
        while self.ready is None and self.dead is None:
            self._changed.clear()
            await self._changed.wait()

    async def wait_dead(self) -> None:
        """Until the engine is dead."""
        while self.dead is None:
            self._changed.clear()
            await self._changed.wait()

    def require(self) -> Ready:
        """The ready engine's facts; EngineDeadError or NotReadyError when there is none."""
        if self.restarting is not None:
            raise NotReadyError(f"the engine is being restarted ({self.restarting}): try again")
        if self.dead is not None:
            raise self._stopped()
        if self.ready is None:
            raise NotReadyError("the model is still loading: try again, or poll /health")
        return self.ready

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.ready is not None and self.dead is None and self.restarting is None

    @property
    def health(self) -> dict[str, str]:
        """`status`: ok, starting, restarting or dead, with the reason of the latter two."""
        if self.restarting is not None:
            return {"status": "restarting", "reason": self.restarting}
        if self.dead is not None:
            return {"status": "dead", "reason": self.dead}
        return {"status": "starting" if self.ready is None else "ok"}

    @property
    def load(self) -> int:
        """Choices under way."""
        return len(self._flights)

    @property
    def awaits(self) -> bool:
        """Whether the engine owes an answer to somebody."""
        return bool(self._flights or self._answers)

    def submit(self, group: SubmitGroup, flight: Flight) -> None:
        """Send the choices of one prompt to the engine."""
        group.think_id = self._think_id
        flight.add(group.rids, self)
        self._flights.update(dict.fromkeys(group.rids, flight))
        self._send(group)

    def forget(self, rids: Sequence[str], abort: bool) -> None:
        """Take no more messages for these choices."""
        for rid in rids:
            self._flights.pop(rid, None)
        if abort and self.dead is None:
            self._send(Abort(list(rids)))

    async def flush(self, timeout: float = 10.0) -> int:
        """Empty the prefix cache; returns the pages freed."""
        answer = await self._ask(Flush(uuid.uuid4().hex), timeout)
        assert isinstance(answer, Flushed)
        return answer.pages

    async def profile(self, folder: str | None, timeout: float = 120.0) -> str:
        """Start a profile that `folder` is for, or with None stop it; the file that was written.

        RequestError when one runs already, or none does.
        """
        answer = await self._ask(Profile(folder, uuid.uuid4().hex), timeout)
        assert isinstance(answer, Profiled)
        if answer.refused:
            raise RequestError(answer.refused)
        return answer.path

    async def adapt(self, name: str, folder: str | None, timeout: float = 600.0) -> None:
        """Load the adapter in `folder` under a name, or with None unload it.

        RequestError when that cannot be; nothing has changed then.
        """
        answer = await self._ask(Adapt(name, folder, uuid.uuid4().hex), timeout)
        assert isinstance(answer, Adapted)
        if answer.refused:
            param = "lora_name" if folder is None else answer.param or "lora_path"
            raise RequestError(answer.refused, param)

    async def hold(self, message: HoldPages, timeout: float = 60.0) -> bytes:
        """Hold pages of a prompt for another engine; the offer that it needs. RequestError where
        nothing can be held."""
        answer = await self._ask(message, timeout)
        assert isinstance(answer, PagesHeld)
        if answer.refused:
            raise RequestError(answer.refused)
        return answer.offer

    async def pull(self, message: PullPages, timeout: float = 600.0) -> int:
        """Read pages that another engine holds; how many tokens of the prompt are cached then.
        RequestError where none came; nothing has changed then."""
        answer = await self._ask(message, timeout)
        assert isinstance(answer, PagesPulled)
        if answer.refused:
            raise RequestError(answer.refused)
        return answer.tokens

    def tell_adapter(self, name: str, folder: str | None) -> None:
        """The same without an answer, for an engine that others have gone ahead of."""
        self._send(Adapt(name, folder))

    def _adapt_again(self, ready: Ready) -> None:
        """Bring an engine that was restarted to the adapters of the one before."""
        self.adapters = ready.adapters
        for name in self.adapted.keys() & set(ready.adapters):
            self._send(Adapt(name))
        for name, folder in self.adapted.items():
            if folder is not None:
                self._send(Adapt(name, folder))

    async def _ask(
        self, message: Flush | Profile | Adapt | HoldPages | PullPages, timeout: float
    ) -> Answer:
        self.require()
        future = self._answers[message.token] = self._loop.create_future()
        self._send(message)
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError as e:
            raise EngineDeadError(f"the engine did not answer within {timeout:g} s") from e
        finally:
            self._answers.pop(message.token, None)

    def fail(self, reason: str) -> None:
        """The engine is gone: everybody who waits gets the reason. The first reason stays."""
        if self.dead is not None:
            return
        flights = set(self._flights.values())
        running = sorted(self._flights)
        if running and self._context is not None:
            self._send(Abort(running))
        self.dead = reason
        self._flights.clear()
        for flight in flights:
            flight.put(self._stopped())
        for future in self._answers.values():
            if not future.done():
                future.set_exception(self._stopped())
        self._changed.set()

    def end(self) -> None:
        """The server leaves: whoever still waits is told so."""
        self.draining = True
        self.fail(_LEAVING)

    def _stopped(self) -> DsRuntimeError:
        """Why nothing more comes, and what follows: nothing at all once the server leaves."""
        if self.dead == _LEAVING:
            return DrainingError(f"{_LEAVING}: this request has ended before its answer was whole")
        follows = _LEAVING if self.draining else self.outlook and self.outlook()
        return EngineDeadError(
            f"the engine has stopped: {self.dead}" + (f"; {follows}" if follows else "")
        )

    def _send(self, message: ToEngine) -> None:
        self._push.send(encoder.encode(message), zmq.NOBLOCK)

    def _drain(self) -> None:
        # The socket's descriptor signals edges: read until nothing is left, or come back at once.
        if self._context is None:
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(_DRAIN):
                frame = self._pull.recv(zmq.NOBLOCK)
                self.heard += 1
                for message in decode_from_engine.decode(frame):
                    self._receive(message)
            self._loop.call_soon(self._drain)
            return
        if self._turn is None and (pause := self.turns.over()) > 0:
            self._loop.remove_reader(self._fd)
            self._turn = self._loop.call_later(pause, self._next_turn)

    def _next_turn(self) -> None:
        self._turn = None
        self._loop.add_reader(self._fd, self._drain)
        self._drain()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Tokens():
                flight = self._flights.get(message.rid)
                if flight is not None:
                    self.turns.taken += 1
                    if message.finish is not None:
                        self.forget([message.rid], abort=False)
                    flight.put(message, gathers=self.turns.pause > 0)
            case Failed():
                flight = self._flights.get(message.rid)
                if flight is not None:
                    self.forget([message.rid], abort=False)
                    flight.lose(message.rid)
                    flight.put(message.error)
            case Stats():
                self.stats = message
            case Flushed() | Profiled() | Adapted() | PagesHeld() | PagesPulled():
                if isinstance(message, Adapted):
                    self.adapters = message.adapters
                future = self._answers.get(message.token)
                if future is not None and not future.done():
                    future.set_result(message)
            case Ready():
                self.ready = message
                self._adapt_again(message)
                self._changed.set()
            case Dead():
                self.fail(message.reason)
