"""Ends a process that is rank 0 itself and waits for ever in a call for a rank that has died.

The offline API runs rank 0 in the user's process. Where another rank dies, a communicator may never
come back from native code, or hold Python's lock there, so that no thread of that process can act.
So a second process watches: `python -I -S sentry.py`, which imports this file alone.

A rank holds a pipe. The pipe's end says that the rank has died, unless the rank has written
`LEFT` before. A counter in a shared file says whether rank 0 is in a call of the engine (odd); it
moves while the call gets on. A user's own work is never ended: rank 0 hears of the death in its
next call.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LEFT = b"."  # what a rank writes that leaves because it was told to
_LOOK = 0.25
_COUNTER = 8  # bytes


class Sentry:
    """The process, and the counter that it looks at. Close it when the ranks have ended."""

    def __init__(self, folder: Path, patience: float) -> None:
        """patience: seconds for a call to notice by itself, as most communicators do."""
        self._folder, self._patience = folder, patience
        path = folder / "calls"
        path.write_bytes(bytes(_COUNTER))
        with path.open("r+b") as file:
            self._counter = mmap.mmap(file.fileno(), _COUNTER)
        self._calls = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, lives: Mapping[int, Connection], pids: Mapping[int, int]) -> None:
        """Watch. lives: by rank, the pipe that ends with it, closed here; pids: of these ranks."""
        ranks = [[rank, pids[rank], pipe.fileno()] for rank, pipe in lives.items()]
        given = json.dumps([os.getpid(), os.fspath(self._folder), ranks, self._patience])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[pipe.fileno() for pipe in lives.values()],
            start_new_session=True,  # Ctrl-C is not for it
        )
        for pipe in lives.values():
            pipe.close()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Within, rank 0 is in a call of the engine. A call within a call is part of it."""
        if self._calls % 2:
            yield
            return
        self._count(1)
        try:
            yield
        finally:
            self._count(1)

    def stir(self) -> None:
        """The call is getting on, if there is one."""
        self._count(2)

    def _count(self, more: int) -> None:
        self._calls += more
        self._counter[:] = self._calls.to_bytes(_COUNTER, "little")

    def close(self) -> None:
        """Let it go. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def watch(parent: int, folder: str, ranks: Sequence[tuple[int, int, int]], patience: float) -> None:
    """The life of the process: until its standard input ends, or until it had to act."""
    pids, names = {fd: pid for _, pid, fd in ranks}, {fd: rank for rank, _, fd in ranks}
    gone: list[int] = []
    dead: list[int] = []
    counter, since = 0, time.monotonic()
    while True:
        waiting = [0, *(fd for fd in pids if fd not in gone)]
        ready = _ready(waiting, _LOOK if dead else None)
        if 0 in ready:
            return
        gone += ready
        dead += [fd for fd in ready if not os.read(fd, 1)]
        now, (before, counter) = time.monotonic(), (counter, _read(folder))
        if ready or counter != before or not counter % 2:
            since = now
        elif now - since > patience:
            break
    reason = _cause(folder, names[dead[0]])
    print(
        f"ds-runtime: {reason}; rank 0 waits for it in a call that does not end, so this process "
        f"({parent}) is ended",
        file=sys.stderr,
        flush=True,
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in (*(pid for fd, pid in pids.items() if fd not in gone), parent):
            with suppress(OSError):
                os.kill(pid, number)
        if _ready([0], 1.0):  # the parent is gone
            return


def _ready(descriptors: Sequence[int], seconds: float | None) -> list[int]:
    """As `ds_runtime.common.readable`, which is not to be imported here."""
    poll = select.poll()
    for one in descriptors:
        poll.register(one, select.POLLIN)
    return [one for one, _ in poll.poll(None if seconds is None else seconds * 1000)]


def _read(folder: str) -> int:
    with suppress(OSError), open(os.path.join(folder, "calls"), "rb") as file:
        return int.from_bytes(file.read(_COUNTER), "little")
    return 0


def _cause(folder: str, rank: int) -> str:
    """What the ranks have left (`failure.leave_reason`), the earliest."""
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name.endswith(".reason"):
            with open(os.path.join(folder, name)) as file:
                found.append(json.load(file))
    if found:
        return str(min(found)[3])
    return f"engine rank {rank} has died without a reason (killed, out of memory?)"


if __name__ == "__main__":
    watch(*json.loads(sys.argv[1]))
