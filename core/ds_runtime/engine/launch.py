"""The engine's processes: one per rank, watched, and ended together.

A child that fails leaves its reason in the private folder; the watcher ends the others and keeps
the reason of the first. A child whose parent dies exits at once. What children write goes where the
parent's goes, or line by line to whoever asks for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import zmq

from ds_runtime import errors, interrupt
from ds_runtime.config import EngineConfig
from ds_runtime.engine.messages import Stop, encoder
from ds_runtime.engine.rankspec import RankSpec
from ds_runtime.engine.transport import connect_push, ipc

_GRACE = 0.3  # seconds for a dying rank's neighbours to leave their reasons
_LONGEST = 1 << 16  # bytes of a line
_WHERE: int | None = getattr(signal, "SIGUSR1", None)  # has a rank say where each of its threads is

Tell = Callable[[RankSpec, str], None]
"""Takes one event of a rank's output: a line, or a traceback with all of its lines."""


class RankGroup:
    """Some ranks' processes. `failure` is set once, when one of them dies unasked.

    `tell` gets what they write, in threads of its own; None: they write where this process does.
    """

    def __init__(self, specs: Sequence[RankSpec], tell: Tell | None = None) -> None:
        self._specs = list(specs)
        self._tell = tell
        self._processes: list[BaseProcess] = []
        self._stopping = threading.Event()
        self._failed = threading.Event()
        self.failure: errors.DsRuntimeError | None = None
        self._wake, self._woken = multiprocessing.Pipe()

    def start(self) -> None:
        """Start every process (spawn) and the watcher."""
        context = multiprocessing.get_context("spawn")
        with interrupt.ignored():
            for spec in self._specs:
                self._processes.append(self._start(context, spec))
        threading.Thread(target=self._watch, name="ds-runtime watcher", daemon=True).start()

    def _start(self, context: SpawnContext, spec: RankSpec) -> BaseProcess:
        ours, theirs = (None, None) if self._tell is None else context.Pipe(duplex=False)
        name = f"ds-runtime rank {spec.rank}"
        process = context.Process(target=rank_main, args=(spec, theirs), name=name, daemon=True)
        process.start()
        if ours is not None and theirs is not None:
            theirs.close()  # the child has its own: what is read ends with it
            reader = threading.Thread(
                target=_pass_on, args=(ours, spec, self._tell), name=f"{name} output", daemon=True
            )
            reader.start()
        return process

    def trace(self) -> None:
        """Have every process write where each of its threads is."""
        if _WHERE is None:
            return
        for pid in self.pids:
            with contextlib.suppress(OSError):  # it is gone
                os.kill(pid, _WHERE)

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of the ranks; empty before the start."""
        return [p.pid for p in self._processes if p.pid is not None]

    def poll(self) -> str | None:
        """Why the engine ended, or None while it lives."""
        return None if self.failure is None else str(self.failure)

    def wait_failure(self, timeout: float) -> errors.DsRuntimeError | None:
        """`failure`, waiting up to `timeout` seconds for it once the processes are started."""
        if self._processes:
            self._failed.wait(timeout)
        return self.failure

    def stop(self, timeout: float = 5.0) -> None:
        """Wait for the processes to leave, then end them; returns within about `timeout`."""
        self._stopping.set()
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, deadline - 1.0 - time.monotonic()))
        self._end(deadline)
        with contextlib.suppress(OSError):
            self._wake.send_bytes(b"stop")

    def _end(self, deadline: float) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(1.0)

    def _watch(self) -> None:
        sentinels = [p.sentinel for p in self._processes]
        dead = wait([*sentinels, self._woken])
        if self._stopping.is_set() or self._woken in dead:
            return
        for process in self._processes:
            if process.sentinel in dead:
                process.join(1.0)  # the sentinel speaks before the exit code is there
        killed = self._killed()
        time.sleep(_GRACE)
        self.failure = self._reason(killed)
        self._failed.set()
        self._end(time.monotonic() + 2.0)

    def _killed(self) -> list[tuple[int, int]]:
        """(rank, signal) of the processes that a signal ended."""
        found = []
        for spec, process in zip(self._specs, self._processes, strict=True):
            code = process.exitcode
            if code is not None and code < 0:
                found.append((spec.rank, -code))
        return found

    def _reason(self, killed: list[tuple[int, int]]) -> errors.DsRuntimeError:
        """The first cause: a signal, else the earliest reason that a rank left behind."""
        for rank, number in killed:
            name = signal.Signals(number).name
            hint = " (out of memory?)" if number == signal.SIGKILL else ""
            return errors.EngineDeadError(f"engine rank {rank} was ended by {name}{hint}")
        left = [r for s in self._specs if (r := read_reason(s.folder, s.rank)) is not None]
        if left:
            _, kind, message = min(left)
            return as_error(kind, message)
        codes = ", ".join(
            f"rank {s.rank}: {p.exitcode}"
            for s, p in zip(self._specs, self._processes, strict=True)
            if p.exitcode is not None
        )
        return errors.EngineDeadError(f"the engine has left (exit codes: {codes})")


class EngineProcesses:
    """The engine of a server: every rank in a process of its own.

    `folder` is private to this engine (`transport.private_folder`). The front end binds a PULL
    socket at `from_engine` and sends to `to_engine`, which rank 0 binds. It is number `replica` of
    `replicas` on this machine. `tell`: as for RankGroup.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: str | os.PathLike[str],
        explicit: Iterable[str] = (),
        plugins: Iterable[str] = (),
        replica: int = 0,
        replicas: int = 1,
        tell: Tell | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.to_engine = ipc(self.folder, "to_engine")
        self.from_engine = ipc(self.folder, "from_engine")
        own = config, tuple(explicit), tuple(plugins), self.folder
        specs = [RankSpec(*own, rank, replica, replicas) for rank in range(config.tp)]
        self.group = RankGroup(specs, tell)

    def start(self) -> None:
        """Start the processes; the engine answers with Ready, or `poll` says why not."""
        self.group.start()

    def poll(self) -> str | None:
        """Why the engine ended, as a sentence, or None while it lives."""
        return self.group.poll()

    @property
    def failure(self) -> errors.DsRuntimeError | None:
        """The same as an error to raise."""
        return self.group.failure

    def trace(self) -> None:
        """Have every process write where each of its threads is."""
        self.group.trace()

    def stop(self, timeout: float = 5.0) -> None:
        """Ask the engine to leave, then end what is left."""
        if self.group.poll() is None:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            socket = connect_push(context, self.to_engine)
            socket.send(encoder.encode(Stop()))
            context.destroy(linger=200)
        self.group.stop(timeout)


def rank_main(spec: RankSpec, output: Connection | None = None) -> None:
    """Entry of a rank's process; leaves the reason in the folder when it fails.

    `output`: a pipe for what it writes, also below Python.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to leave
    if output is not None:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        output.close()
    if _WHERE is not None:
        faulthandler.register(_WHERE, all_threads=True)
    _exit_with_parent(spec.folder)
    try:
        for name, value in spec.process_env().items():  # before torch loads what reads them
            os.environ.setdefault(name, value)
        if spec.rank == 0:
            from ds_runtime.engine.loop import serve

            serve(spec)
        else:
            from ds_runtime.engine.ranks import follow

            follow(spec)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # taking torch down in order costs a second
    except BaseException as e:
        leave_reason(spec, e)
        if not isinstance(e, errors.DsRuntimeError):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # no clean-up: other ranks may never answer again


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


def _exit_with_parent(folder: Path) -> None:
    """Leave as soon as the parent has, and take the folder along that it can no longer remove."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def leave_reason(spec: RankSpec, error: BaseException) -> None:
    """Write why this rank ends, for the watcher."""
    message = str(error)
    if not message and isinstance(error, MemoryError):
        message = "the system refused memory"
    if not isinstance(error, errors.DsRuntimeError):
        message = f"engine rank {spec.rank} failed: {type(error).__name__}: {message}"
    said = {"time": time.time(), "kind": type(error).__name__, "message": message}
    path = spec.folder / f"rank{spec.rank}.reason"
    with contextlib.suppress(OSError):  # the folder is gone with the parent
        path.with_suffix(".part").write_text(json.dumps(said))
        path.with_suffix(".part").replace(path)


def read_reason(folder: Path, rank: int) -> tuple[float, str, str] | None:
    """(time, kind, message) that a rank left, if it did."""
    try:
        said = json.loads((folder / f"rank{rank}.reason").read_text())
    except FileNotFoundError:
        return None
    return said["time"], said["kind"], said["message"]


def as_error(kind: str, message: str) -> errors.DsRuntimeError:
    """The error of a child, again as its class."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.DsRuntimeError):
        return known(message)
    return errors.EngineDeadError(message)
