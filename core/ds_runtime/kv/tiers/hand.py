"""One rank's threads between the slots of its host memory and files.

A file waits for the copies that were queued in front of it. What is written is in its slot by then,
and no copy reads a slot that is filled. Steps wait for neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from ds_runtime.kv.tiers.folder import DiskFolder

LOST = -1
"""What a read gives that filled nothing."""
_READERS = 4


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
        """Delete files, also those that are being written."""
        ...

    def poll(self, finish: bool = False) -> None:
        """Continue. finish: wait for copies."""
        ...

    def wait(self, some: Collection[Future[int]], seconds: float) -> None:
        """Return once one of these is done, or after so long."""
        ...

    def close(self, leaves: bool = False) -> None:
        """Write what is begun; reads are lost. leaves: what is not being written is lost, too, and
        nobody waits for what is."""
        ...

    @property
    def stopped(self) -> str:
        """Why nothing is written any more; "" while it is."""
        ...


@dataclass(slots=True)
class _Waiting:
    """A file, once the copies up to number `after` have ended."""

    after: int
    kind: str
    name: bytes
    writes: bool
    future: Future[int]
    begin: Callable[[], None]


class DiskHand:
    """writes: whether files are this rank's to write, and not another's that has the same bytes.
    part: which of the different parts of a page it has; each is a file of its own."""

    def __init__(
        self, folder: DiskFolder, memory: SlotMemory, writes: bool = True, part: int = 0
    ) -> None:
        self.folder, self._memory = folder, memory
        self._writes, self._part = writes, part
        self._waiting: list[_Waiting] = []
        self._closing = threading.Event()
        self._writer = ThreadPoolExecutor(1, "disk cache, writing")
        self._readers = ThreadPoolExecutor(_READERS, "disk cache, reading")

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
            self._writer.submit(_fill, future, lambda: self.folder.write(own, kind, parts))

        own = self._own(name)
        return self._add(_Waiting(self._memory.queued, kind, name, True, future, begin))

    def read(self, kind: str, slot: int, name: bytes) -> Future[int]:
        """As Hands."""
        own, future = self._own(name), Future[int]()

        def read() -> int:
            parts = self._memory.parts(kind, slot)
            if self._closing.is_set() or not self.folder.read(own, kind, parts):
                return LOST
            return sum(part.nbytes for part in parts)

        def begin() -> None:
            self._readers.submit(_fill, future, read)

        return self._add(_Waiting(self._memory.queued, kind, name, False, future, begin))

    def _add(self, one: _Waiting) -> Future[int]:
        self._waiting.append(one)
        self.poll()
        return one.future

    def forget(self, name: bytes, kinds: Collection[str]) -> None:
        """As Hands."""
        gone = [w for w in self._waiting if w.writes and w.name == name and w.kind in kinds]
        self._waiting = [one for one in self._waiting if one not in gone]
        for one in gone:
            one.future.set_result(0)
        own = self._own(name)
        for kind in kinds:
            self.folder.forget(own, kind)  # nobody reads it from now on
            self._writer.submit(self.folder.forget, own, kind)  # nor what is being written

    def poll(self, finish: bool = False) -> None:
        """As Hands."""
        if not self._waiting:
            return
        ended = self._memory.ended(finish)
        due = [one for one in self._waiting if one.after <= ended]
        self._waiting = [one for one in self._waiting if one.after > ended]
        for one in due:
            one.begin()

    def wait(self, some: Collection[Future[int]], seconds: float) -> None:
        """As Hands."""
        wait(some, seconds, FIRST_COMPLETED)

    def close(self, leaves: bool = False) -> None:
        """As Hands."""
        self._closing.set()
        self.poll(finish=True)
        self._writer.shutdown(wait=not leaves, cancel_futures=leaves)
        self._readers.shutdown()

    def _own(self, name: bytes) -> bytes:
        """The name of this rank's part of a page."""
        return sha256(name + bytes([self._part])).digest() if self._part else name


def _fill(future: Future[int], do: Callable[[], int]) -> None:
    try:
        future.set_result(do())
    except BaseException as e:
        future.set_exception(e)
