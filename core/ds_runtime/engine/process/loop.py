"""The engine's process: receive, step, emit. Waits without spinning when there is no work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

import zmq
from msgspec.structs import replace

from ds_runtime.engine.banner import banner
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.messages import (
    Abort,
    Adapt,
    Adapted,
    Dead,
    Flush,
    Flushed,
    FromEngine,
    Profile,
    Profiled,
    Ready,
    Stop,
    Submit,
    SubmitGroup,
    ToEngine,
    decode_to_engine,
    encoder,
)
from ds_runtime.engine.process.failure import described
from ds_runtime.engine.process.profiler import Profiler
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.engine.process.start import start_engine, tell
from ds_runtime.engine.process.transport import bind_pull, connect_push, ipc
from ds_runtime.errors import RequestError
from ds_runtime.kv.transfer.asked import HoldPages, PullPages
from ds_runtime.kv.transfer.desk import Desk

_STATS_SECONDS = 0.25
_IDLE = 1000  # milliseconds without work before anything is prepared


class EngineLoop:
    """Moves messages between two sockets and an engine, and pages between it and others, until it
    is told to stop."""

    def __init__(
        self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], desk: Desk
    ) -> None:
        self.engine, self.desk = engine, desk
        self._inbox, self._outbox = inbox, outbox
        self._stopped = False
        self._stats_due = self._quiet_at = 0.0
        self._rests = False
        self._profiler = Profiler()

    def run(self) -> None:
        """Until a Stop message."""
        self._quiet_at = time.monotonic() + _IDLE / 1000
        while not self._stopped:
            heard = self._receive()
            messages = [*self.engine.step(), *self.desk.poll()]
            if messages:  # one write for a whole step
                self._outbox.send(encoder.encode(messages))
            self._tell_stats(heard or bool(messages))

    def emit(self, message: FromEngine) -> None:
        """Send one message to the front end."""
        self._outbox.send(encoder.encode([message]))

    def _receive(self) -> bool:
        """Take every message that is here, and say if there was one; wait for one when there is
        nothing to compute, and nothing to prepare."""
        busy, heard = self.engine.has_work, False
        if not busy:
            self._wait()
        while self._inbox.poll(0):
            self._take(decode_to_engine.decode(self._inbox.recv()))
            heard = True
        if busy or heard:
            self._quiet_at = time.monotonic() + _IDLE / 1000
        return heard

    def _wait(self) -> None:
        """For a message, and no longer than the desk may; prepare one thing if none comes."""
        turn, quiet = self.desk.turn, int((self._quiet_at - time.monotonic()) * 1000)
        looks = self.desk.moves or (turn is not None and turn < quiet)
        if looks or not (self._inbox.poll(max(0, quiet)) or self.engine.prepare()):
            self._inbox.poll(turn)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, SubmitGroup):
            for submit in message.choices():
                self._submit(submit)
        elif isinstance(message, Abort):
            self.engine.abort(message.rids)
        elif isinstance(message, Flush):
            self.emit(Flushed(message.token, self.engine.flush()))
        elif isinstance(message, Profile):
            self._profile(message)
        elif isinstance(message, Adapt):
            self._adapt(message)
        elif isinstance(message, HoldPages | PullPages):
            self.desk.take(message)
        elif isinstance(message, Stop):
            self._stopped = True

    def _submit(self, submit: Submit) -> None:
        if (failed := self.engine.submit(submit)) is not None:
            self.emit(failed)

    def _profile(self, message: Profile) -> None:
        stop, start = self._profiler.stop, self._profiler.start
        path, refused = _tried(stop) if message.folder is None else _tried(start, message.folder)
        self.emit(Profiled(message.token, path or "", refused))

    def _adapt(self, message: Adapt) -> None:
        named, engine, refused, param = message.name, self.engine, "", None
        try:
            if message.folder is None:
                engine.unload_adapter(named)
            else:
                engine.load_adapter(named, message.folder)
        except RequestError as e:
            refused, param = str(e), e.param
        self.emit(Adapted(message.token, engine.adapters.names, refused, param))

    def _tell_stats(self, news: bool) -> None:
        """A few times a second; where nothing is under way once, and again after any message."""
        now, rested = time.monotonic(), self._rests
        self._rests = not (self.engine.has_work or self.desk.busy)
        if news or not rested if self._rests else now >= self._stats_due:
            self._stats_due = now + _STATS_SECONDS
            self.emit(replace(self.engine.stats(), **self.desk.counts))


def _tried(do: Callable[..., str | None], *args: str) -> tuple[str | None, str]:
    """What it returns, and why it was refused."""
    try:
        return do(*args), ""
    except RequestError as e:
        return None, str(e)


def serve(spec: RankSpec) -> None:
    """The life of rank 0: load, say Ready, serve. A failure is told to the front end as Dead."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = bind_pull(context, ipc(spec.folder, "to_engine"))
    outbox = connect_push(context, ipc(spec.folder, "from_engine"))
    engine: Engine | None = None
    try:
        engine = start_engine(spec)
        loop = EngineLoop(engine, inbox, outbox, desk_of(engine, ipc(spec.folder, "pages")))
        loop.emit(ready(engine))
        loop.emit(engine.stats())  # what the start has counted
        loop.run()
        loop.desk.close()
        engine.close()
    except BaseException as e:
        if engine is not None and engine.leader is not None:
            tell(engine.leader, spec, e)
        # Of several ranks, one meets only the broken connection of the one that fell: the watcher
        # in the front end's process knows which was first and why.
        if spec.size == 1:
            outbox.send(encoder.encode([Dead(described(e, spec.rank))]))
        raise
    finally:
        context.destroy(linger=500)


def desk_of(engine: Engine, address: str) -> Desk:
    """Where pages of an engine are handed over."""
    groups, find = engine.scheduler.holdings.groups, engine.adapters.find
    return Desk(engine.assembly, engine.runner, groups, find, address)


def ready(engine: Engine) -> Ready:
    """What the front end needs to know of a loaded engine."""
    runner = engine.runner
    return Ready(
        banner=banner(engine.assembly, runner),
        context_length=runner.context_length,
        vocab_size=engine.assembly.model.vocab_size,
        kv_tokens=runner.kv_tokens,
        page_size=engine.assembly.config.page_size,
        queue_limit=engine.assembly.config.max_queued_requests,
        adapters=engine.adapters.names,
        settings=asdict(engine.assembly.config),
        plan=engine.assembly.plan.to_dict(),
    )
