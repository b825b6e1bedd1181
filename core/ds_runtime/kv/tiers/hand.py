"""One rank's threads between the slots of its host memory and files.

A file waits for the copies that were queued in front of it. What is written is in its slot by then,
and no copy reads a slot that is filled. Steps wait for neither.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Protocol

from ds_runtime.kv.tiers.folder import DiskFolder

LOST = -1
"""What a read gives that filled nothing."""
_READERS = 4
_FORGETS = 1.0  # seconds that a step waits until a file is deleted
_LAST_WRITES = 60.0  # seconds that whoever closes waits for what is begun
_LAST_READS = 1.0  # seconds that whoever closes waits for reads under way, which are lost


class EndedFutures:
    """Futures that have ended. Any thread ends one, a single thread takes them.

    Who asks each of thousands whether it has ended holds the interpreter's lock, which the threads
    need that read these files.
    """

    def __init__(self) -> None:
        self._ended = deque[Future[int]]()
        self._some = threading.Event()

    def watch(self, future: Future[int]) -> None:
        """It is taken once, after its end."""
        future.add_done_callback(self._end)

    def _end(self, future: Future[int]) -> None:
        self._ended.append(future)
        self._some.set()

    def wait(self, seconds: float) -> bool:
        """Whether one has ended since the last `take`, or during it; waits so long at most."""
        return self._some.wait(seconds)

    def take(self) -> list[Future[int]]:
        """All that have ended by now."""
        self._some.clear()
        return [self._ended.popleft() for _ in range(len(self._ended))]


class SlotMemory(Protocol):
    """Host memory of slots: see `kv.tiers.copies.HostCopies`."""

    def parts(self, kind: str, slot: int) -> list[memoryview]: ...
    def ended(self, finish: bool) -> int: ...
    @property
    def queued(self) -> int: ...


class Hands(Protocol):
    """Who moves slots to files and back, on every rank that has them. Called by one thread."""

    def write(self, kind: str, slot: int, name: bytes) -> Future[int]:
        """Bytes that are written, after the copies that are queued by now."""
        ...

    def read(self, kind: str, slot: int, name: bytes) -> Future[int]:
        """Bytes that are read to a slot which nobody else has; LOST where not all are there."""
        ...

    def forget(self, name: bytes, kinds: Collection[str]) -> None:
        """Delete files, also those that are being written. Nobody here reads them from now on, and
        no other process unless the disk takes longer than a second to delete one."""
        ...

    def poll(self, finish: bool = False) -> None:
        """Continue. finish: wait for copies."""
        ...

    def wait(self, ended: EndedFutures, seconds: float) -> None:
        """Return once one of those that it watches has ended, or after so long."""
        ...

    def close(self, leaves: bool = False) -> None:
        """Write what is begun; reads are lost, and those under way end within a second or stay
        undone. leaves: what is not being written is lost, too, and nobody waits for what is."""
        ...

    @property
    def stopped(self) -> str:
        """Why nothing is written any more; "" while it is."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """A file, once the copies up to number `after` have ended."""

    after: int
    kind: str
    name: bytes
    writes: bool
    future: Future[int]
    begin: Callable[[], None]


class FileThreads:
    """Threads that do jobs in the order in which these come. A file may hang for ever, so a process
    ends without them: those of `concurrent.futures` would keep it."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs = SimpleQueue[tuple[Future[int], Callable[[], int]] | None]()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, do: Callable[[], int], future: Future[int] | None = None) -> Future[int]:
        """Have it done; future: what its result, or what it raises, goes to."""
        future = future or Future()
        self._jobs.put((future, do))
        return future

    def drop(self, result: int) -> None:
        """Jobs that have not begun never do: this is their result."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            if job is not None:
                job[0].set_result(result)

    def close(self, seconds: float | None = None) -> None:
        """Return once every job has ended, or after so long. None comes after."""
        until = None if seconds is None else time.monotonic() + seconds
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))


class DiskHand:
    """writes: whether files are this rank's to write, and not another's that has the same bytes.
    part: which of the different parts of a page it has; each is a file of its own."""

    def __init__(
        self, folder: DiskFolder, memory: SlotMemory, writes: bool = True, part: int = 0
    ) -> None:
        self.folder, self._memory = folder, memory
        self._writes, self._part = writes, part
        self._waiting = deque[_Waiting]()  # in the order of the copies that they wait for
        self._closing = threading.Event()
        self._writer = FileThreads(1, "disk cache, writing")
        self._readers = FileThreads(_READERS, "disk cache, reading")
        self._eraser = FileThreads(1, "disk cache, deleting")
        self._gone: dict[tuple[bytes, str], Future[int]] = {}  # what is to be deleted first

    @property
    def stopped(self) -> str:
        """As Hands."""
        return self.folder.stopped

    def write(self, kind: str, slot: int, name: bytes) -> Future[int]:
        """As Hands."""
        future = Future[int]()
        if not self._writes:
            future.set_result(0)
            return future

        def begin() -> None:
            parts = self._memory.parts(kind, slot)
            self._writer.submit(lambda: self._put(own, kind, parts), future)

        own = self._own(name)
        return self._add(_Waiting(self._memory.queued, kind, name, True, future, begin))

    def read(self, kind: str, slot: int, name: bytes) -> Future[int]:
        """As Hands."""
        own, future = self._own(name), Future[int]()
        erased = self._gone.get((own, kind))

        def read() -> int:
            if self._closing.is_set() or (erased is not None and not erased.done()):
                return LOST
            try:
                parts = self._memory.parts(kind, slot)
                if not self.folder.read(own, kind, parts):
                    return LOST
                return sum(part.nbytes for part in parts)
            except Exception:  # no memory, say: the page is computed
                return LOST

        def begin() -> None:
            self._readers.submit(read, future)

        return self._add(_Waiting(self._memory.queued, kind, name, False, future, begin))

    def _put(self, own: bytes, kind: str, parts: Sequence[memoryview]) -> int:
        try:
            return self.folder.write(own, kind, parts)
        except Exception as e:  # whatever it is, an engine goes on without its disk
            self.folder.stop(e)
            return 0

    def _add(self, one: _Waiting) -> Future[int]:
        self._waiting.append(one)
        self.poll()
        return one.future

    def forget(self, name: bytes, kinds: Collection[str]) -> None:
        """As Hands."""
        gone = [w for w in self._waiting if w.writes and w.name == name and w.kind in kinds]
        for one in gone:
            self._waiting.remove(one)
            one.future.set_result(0)
        own = self._own(name)
        self._gone = {one: erased for one, erased in self._gone.items() if not erased.done()}
        seconds = 0.0 if self._gone else _FORGETS  # a disk that hangs is waited for once
        for kind in kinds:
            erase = partial(self._forget, own, kind)
            self._gone[own, kind] = self._eraser.submit(erase)
            self._writer.submit(erase)  # nor is there later what is being written
        wait([self._gone[own, kind] for kind in kinds], seconds)

    def _forget(self, own: bytes, kind: str) -> int:
        self.folder.forget(own, kind)
        return 0

    def poll(self, finish: bool = False) -> None:
        """As Hands."""
        if not self._waiting:
            return
        ended = self._memory.ended(finish)
        while self._waiting and self._waiting[0].after <= ended:
            self._waiting.popleft().begin()

    def wait(self, ended: EndedFutures, seconds: float) -> None:
        """As Hands."""
        ended.wait(seconds)

    def close(self, leaves: bool = False) -> None:
        """As Hands."""
        self._closing.set()
        self.poll(finish=True)
        self._readers.drop(LOST)
        self._eraser.close(_FORGETS)
        leaves |= not all(one.done() for one in self._gone.values())  # the writer deletes, too
        if leaves:
            self._writer.drop(0)
        self._writer.close(0.0 if leaves else _LAST_WRITES)
        self._readers.close(_LAST_READS)

    def _own(self, name: bytes) -> bytes:
        """The name of this rank's part of a page."""
        return sha256(name + bytes([self._part])).digest() if self._part else name


def _work(jobs: SimpleQueue[tuple[Future[int], Callable[[], int]] | None]) -> None:
    while (job := jobs.get()) is not None:
        future, do = job
        try:
            future.set_result(do())
        except BaseException as e:
            future.set_exception(e)
        del job, future, do  # what they hold is not this thread's while it waits
