"""The engine's processes: one per rank, watched, and ended together.

A child that fails leaves its reason in the private folder and exits; the watcher ends the others,
whatever they wait in, and keeps the first cause. What children write goes where the parent's goes,
or line by line to whoever asks for it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import zmq

from ds_runtime import errors
from ds_runtime.common import interrupt, progress
from ds_runtime.common.patience import ENDING, NEIGHBOURS, STOPPED, STUCK, THEIRS, WORD
from ds_runtime.common.stopped import tell_stopped
from ds_runtime.config import EngineConfig
from ds_runtime.engine.messages import Stop, encoder
from ds_runtime.engine.process.failure import Reason, leave_reason, reasons
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.engine.process.sentry import Sentry
from ds_runtime.engine.process.transport import connect_push, ipc
from ds_runtime.engine.process.worker import NAME, SHOW_THREADS, UNGUARDED, rank_main
from ds_runtime.parallel.link.messages import Cause, Witness, instead, report
from ds_runtime.parallel.mesh import Mesh

_LONGEST = 1 << 16  # bytes of a line
_TAKEN = -(1 << 16)  # in place of an exit code that somebody else in this process was told
_UNGUARDED = (
    "LLM(tp={size}): the processes of its ranks import the script that makes it, and would make "
    'more: put what the script does under if __name__ == "__main__":'
)

Tell = Callable[[RankSpec, str], None]
"""Takes one event of a rank's output: a line, or a traceback with all of its lines."""


class RankGroup:
    """Some ranks' processes. `failure` is the first cause, set once, when one of them fails.

    `tell` gets what they write, in threads of its own; None: they write where this process does.
    `own`: the rank that this process is itself, if it is one; it says so with `call` and `fail`.
    `far`: rank 0 is on another node, and tells them when to leave. `over`: set when all have ended.
    """

    def __init__(
        self,
        specs: Sequence[RankSpec],
        tell: Tell | None = None,
        own: RankSpec | None = None,
        far: bool = False,
    ) -> None:
        self._specs = list(specs)
        self._tell = tell
        self._own = own
        self._far = far
        self.over = threading.Event()
        self._processes: list[BaseProcess] = []
        self._stopping = threading.Event()
        self._ending = threading.Lock()
        self._reaping = threading.Lock()
        self._ended = False  # by this process
        self._failed = threading.Event()
        self.failure: errors.DsRuntimeError | None = None
        self._watcher: threading.Thread | None = None
        self._wake, self._woken = multiprocessing.Pipe()
        self._sentry = None if own is None else Sentry(own.folder, STUCK)

    def start(self) -> None:
        """Start every process (spawn) and the watcher."""
        context = multiprocessing.get_context("spawn")
        lives: dict[int, Connection] = {}
        with interrupt.ignored():
            for spec in self._specs:
                self._processes.append(self._start(context, spec, lives))
        self._watcher = threading.Thread(target=self._watch, name="ds-runtime watcher", daemon=True)
        self._watcher.start()
        tell_stopped(self.pids, self._stopping, self._end_stopped)
        if self._sentry is not None:
            ranks = [spec.rank for spec in self._specs]
            self._sentry.start(lives, dict(zip(ranks, self.pids, strict=True)))

    def _start(
        self, context: SpawnContext, spec: RankSpec, lives: dict[int, Connection]
    ) -> BaseProcess:
        ours, theirs = (None, None) if self._tell is None else context.Pipe(duplex=False)
        life = None
        if self._own is not None:
            lives[spec.rank], life = context.Pipe(duplex=False)
        name = f"{NAME} {spec.rank}"
        args = spec, theirs, life
        process = context.Process(target=rank_main, args=args, name=name, daemon=True)
        process.start()
        if life is not None:
            life.close()
        if ours is not None and theirs is not None:
            theirs.close()  # the child has its own: what is read ends with it
            reader = threading.Thread(
                target=_pass_on, args=(ours, spec, self._tell), name=f"{name} output", daemon=True
            )
            reader.start()
        return process

    def trace(self) -> None:
        """Have every process write where each of its threads is."""
        if SHOW_THREADS is None:
            return
        for pid in self.pids:
            with contextlib.suppress(OSError):  # it is gone
                os.kill(pid, SHOW_THREADS)

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of the ranks; empty before the start."""
        return [p.pid for p in self._processes if p.pid is not None]

    def poll(self) -> str | None:
        """Why the engine ended, or None while it lives."""
        return None if self.failure is None else str(self.failure)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around whatever this process does as a rank: it is ended if it waits for one that died
        and does not notice. Long work that shows its progress is not such a wait, and raises the
        failure of another rank at its next piece.
        """
        if self._sentry is None:
            yield
            return
        with self._sentry.call(), progress.heard(self._get_on):
            yield

    def _get_on(self) -> None:
        assert self._sentry is not None
        self._sentry.stir()
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> errors.DsRuntimeError | None:
        """This process, a rank itself, has failed: end the others. Their failure, if it was first:
        what a communicator says of a rank that died hides why it did.
        """
        own = self._own
        assert own is not None and self._sentry is not None
        leave_reason(own.folder, own.rank, error)
        if self._processes and not self._ended:
            self._failed.wait(THEIRS)
            self._stopping.set()
            self._sentry.stir()
            if self.failure is None:
                self.failure = self._first()
            self._end(time.monotonic() + ENDING)
            self._sentry.stir()
        return self.failure

    def leave(self) -> None:
        """The processes are about to be told to leave: from now on an end is no failure."""
        self._stopping.set()

    def stop(self, timeout: float = 5.0) -> str | None:
        """Wait for the processes to leave, then end them; returns within about `timeout`. Why they
        failed in leaving, if one did.
        """
        self.leave()
        deadline, said = time.monotonic() + timeout, None
        for process in self._processes:
            self._code(process, max(0.0, deadline - 1.0 - time.monotonic()))
        if self._processes and self.failure is None and not self._ended:
            self._note_silent()
            self.failure = self._first()
            said = self.poll()
        self._end(deadline)
        with contextlib.suppress(OSError):
            self._wake.send_bytes(b"stop")
        if self._sentry is not None:
            self._sentry.close()
        if self._watcher is not None and self._specs[0].nodes:  # other nodes are told why
            self._watcher.join(3 * WORD)
        return said

    def _end(self, deadline: float) -> None:
        with self._ending:
            self._ended = True
            for process in self._processes:
                if self._code(process) is None:
                    process.kill()
            for process in self._processes:
                self._code(process, max(1.0, deadline - time.monotonic()))

    def _code(self, process: BaseProcess, timeout: float = 0.0) -> int | None:
        """Its exit code once it has ended, for which this waits up to `timeout` seconds. One
        thread asks at a time: where two reap a process at once, one of them is told None.
        """
        ended = wait([process.sentinel], timeout)
        with self._reaping:
            process.join(1.0 if ended else 0.0)  # the sentinel speaks before the exit code
            return _TAKEN if ended and process.exitcode is None else process.exitcode

    def _watch(self) -> None:
        alive = {p.sentinel: p for p in self._processes}
        while alive:
            dead = wait([*alive, self._woken])
            if self._woken in dead:
                return
            for one in dead:
                self._code(alive.pop(cast(int, one)))
            self._note_silent()
            if not self._stopping.is_set():
                time.sleep(NEIGHBOURS)
                if self._first() is None and self._far:
                    continue
                self._tell_rank_0(list(alive))
                self.failure = self._first()
                self._failed.set()
                self._end(time.monotonic() + ENDING)
                self._tell_for_rank_0()
                break
        self.over.set()

    @property
    def _lacks_rank_0(self) -> bool:
        """Whether rank 0 of several nodes was here, and has ended."""
        first, several = self._processes[0], bool(self._specs[0].nodes)
        return not self._far and several and self._code(first) is not None

    def _tell_rank_0(self, alive: list[int]) -> None:
        """What these ranks have left, and let those that live tell it, and leave, by themselves."""
        spec = self._specs[0]
        if not spec.nodes or self._lacks_rank_0:
            return
        for when, rank, _, message in self._left():
            if when == 0.0:  # it could not say so itself
                report(spec.address, spec.keys, Cause(Witness.SEEN, rank, message))
        deadline = time.monotonic() + 2 * WORD
        while alive and (left := deadline - time.monotonic()) > 0:
            ended = wait(alive, left)
            alive = [one for one in alive if one not in ended]

    def _tell_for_rank_0(self) -> None:
        """Ranks of other nodes may wait for rank 0, or ask why it has gone."""
        spec = self._specs[0]
        if self._lacks_rank_0 and self.failure is not None:
            instead(spec.address, spec.keys, str(self.failure))

    def _end_stopped(self, pid: int) -> None:
        spec = self._specs[self.pids.index(pid)]
        said = f"was stopped by a signal and not continued for {STOPPED:.0f} s"
        error = errors.EngineDeadError(f"engine rank {spec.rank} {said}")
        leave_reason(spec.folder, spec.rank, error, 0.0)
        self._processes[self.pids.index(pid)].kill()

    def _note_silent(self) -> None:
        """Give those a reason that have ended without one: as the first, since what another's end
        brings about leaves one.
        """
        leaving = self._far or self._stopping.is_set()
        for spec, process in zip(self._specs, self._processes, strict=True):
            code = self._code(process)
            error: errors.DsRuntimeError
            if code == UNGUARDED:
                error = errors.ConfigError(_UNGUARDED.format(size=spec.size))
            elif code is not None and (said := _ended(code, leaving)):
                error = errors.EngineDeadError(f"engine rank {spec.rank} {said}")
            else:
                continue
            leave_reason(spec.folder, spec.rank, error, 0.0)

    def _left(self) -> list[Reason]:
        """What ranks have left here, the first cause first."""
        every = self._specs if self._own is None else [*self._specs, self._own]
        return reasons(every[0].folder, [spec.rank for spec in every])

    def _first(self) -> errors.DsRuntimeError | None:
        """The first cause, unless this process, which is a rank, is it."""
        found = self._left()
        if not found or (self._own is not None and found[0].rank == self._own.rank):
            return None
        return found[0].error()


class EngineProcesses(RankGroup):
    """The engine of a server: every rank in a process of its own.

    `folder` is private to this engine (`transport.private_folder`). The front end binds a PULL
    socket at `from_engine` and sends to `to_engine`, which rank 0 binds. Of several nodes it has
    the ranks of this one. It is number `replica` of
    `config.replicas` on this machine. `tell`: as for RankGroup.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: str | os.PathLike[str],
        explicit: Iterable[str] = (),
        plugins: Iterable[str] = (),
        replica: int = 0,
        tell: Tell | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.to_engine = ipc(self.folder, "to_engine")
        self.from_engine = ipc(self.folder, "from_engine")
        own = config, tuple(explicit), tuple(plugins), self.folder
        mesh = Mesh.of(config)
        ranks = [rank for rank in range(mesh.size) if mesh.host(rank) == config.node_rank]
        specs = [RankSpec(*own, rank, replica) for rank in ranks]
        super().__init__(specs, tell, far=config.node_rank > 0)

    def stop(self, timeout: float = 5.0) -> str | None:
        """Ask rank 0 to leave, if it is here, then end what is left. Why it failed in leaving, if
        it did.
        """
        if not self._far and self.poll() is None:
            self.leave()
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            socket = connect_push(context, self.to_engine)
            socket.send(encoder.encode(Stop()))
            context.destroy(linger=200)
        return super().stop(timeout)


def _ended(code: int, leaving: bool) -> str:
    """What an exit code says that nobody asked for; leaving: they were told to leave."""
    if code == _TAKEN:
        said = "has ended, and something else took its exit code: is SIGCHLD ignored?"
        return "" if leaving else said
    if code < 0 and not (leaving and code == -signal.SIGTERM):  # which may be sent to everybody
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"was ended by {interrupt.signal_name(-code)}{hint}"
    if code > 0 or (code == 0 and not leaving):
        return (
            f"has left by itself with exit code {code} and gave no reason: something in its "
            "process calls os._exit or exit; ds-runtime plugins lists whose code is loaded"
        )
    return ""


def _pass_on(pipe: Connection, spec: RankSpec, tell: Tell) -> None:
    with contextlib.closing(pipe), open(pipe.fileno(), "rb", closefd=False) as file:
        lines = iter(partial(file.readline, _LONGEST), b"")
        for event in _events(line.decode(errors="replace").rstrip("\r\n") for line in lines):
            tell(spec, event)


def _events(lines: Iterable[str]) -> Iterator[str]:
    """The lines that say something; those of a traceback as one."""
    traceback = ""
    for line in lines:
        if traceback:
            traceback += "\n" + line
            if not line.startswith(" "):
                yield traceback
                traceback = ""
        elif line.startswith("Traceback "):
            traceback = line
        elif line.strip():
            yield line
    if traceback:
        yield traceback
