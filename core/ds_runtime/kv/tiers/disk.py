"""Between host memory and files: what is saved goes on to disk, and what a prompt needs comes back.

Threads read and write the slots themselves. Such a slot is kept: it goes to nobody else before the
thread is done with it. A request whose pages lie on disk waits until they are in host memory, and
others run meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from ds_runtime.kv.tiers.folder import DiskFolder
from ds_runtime.kv.tiers.slots import TierSlots

LONGEST = 30.0  # seconds that a request waits for the disk
_READERS = 4
_LEAST = 4  # a quarter of the slots at most is on its way to the disk


Wanted = tuple[TierSlots, str, bytes, Callable[[int], object]]  # see `Disk.fetch`


class SlotMemory(Protocol):
    """Host memory of slots: see `kv.tiers.copies.HostCopies`."""

    def parts(self, kind: str, slot: int) -> list[memoryview]: ...
    def settled(self, finish: bool) -> bool: ...
    def ended(self, finish: bool) -> int: ...
    @property
    def queued(self) -> int: ...


@dataclass(slots=True, eq=False)
class Fetch:
    """What one request waits for. come: names of pages that are in host memory by it."""

    until: float
    left: int
    done: bool = False
    come: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Writing:
    slots: TierSlots
    kind: str
    slot: int
    name: bytes
    after: int = -1  # the last of the copies that it waits for; −1: not queued yet


@dataclass(slots=True)
class _Bringing:
    """keep: takes a slot that is filled; None: nobody wants it. fetches: all that wait."""

    write: _Writing
    fetches: list[Fetch]
    keep: Callable[[int], object] | None


class Disk:
    """One engine's way to a folder. Called by the thread that schedules."""

    def __init__(self, folder: DiskFolder, memory: SlotMemory) -> None:
        self.folder, self._memory = folder, memory
        self._noted: list[_Writing] = []
        self._owed: deque[_Writing] = deque()  # slots that are not kept, as the disk lags
        self._writing: dict[Future[int], _Writing] = {}
        self._reading: dict[Future[bool], _Bringing] = {}
        self._fetches: list[Fetch] = []
        self._writer = ThreadPoolExecutor(1, "disk cache, writing")
        self._readers = ThreadPoolExecutor(_READERS, "disk cache, reading")
        self._told = False
        self.num_read = self.bytes_written = self.bytes_read = 0

    @property
    def busy(self) -> bool:
        """Whether requests wait for it."""
        return bool(self._fetches)

    @property
    def lags(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._noted or self._owed or self._writing or self._reading)

    def go_on(self, seconds: float) -> None:
        """Nothing else is to be done: wait a little for what is on its way."""
        under_way: list[Future[Any]] = [*self._writing, *self._reading]
        wait(under_way, seconds, FIRST_COMPLETED)
        self.poll(idle=True)

    def save(self, slots: TierSlots, kind: str, slot: int, name: bytes) -> None:
        """A copy to this slot is about to be queued; it goes on to the disk. Where that lags, it
        goes later, if nobody else has the slot by then."""
        if self.folder.stopped:
            return
        if self._has_room(slots):
            slots.keep(slot)
            self._noted.append(_Writing(slots, kind, slot, name))
        else:
            self._owed.append(_Writing(slots, kind, slot, name))
            if len(self._owed) > 2 * slots.count:  # the oldest have no slot any more
                self._owed.popleft()

    def _has_room(self, slots: TierSlots) -> bool:
        """Whether one more slot may be on its way to the disk."""
        return len(self._noted) + len(self._writing) < max(1, slots.count // _LEAST)

    def _catch_up(self) -> None:
        """What the disk lagged behind with, as far as it still has its slot."""
        while self._owed and self._has_room(self._owed[0].slots):
            one = self._owed.popleft()
            if one.slots.find(one.name) == one.slot:
                one.slots.keep(one.slot)
                self._noted.append(one)

    def has(self, name: bytes, kind: str) -> bool:
        """Whether a file of this name is there."""
        return self.folder.has(name, kind)

    def fetch(self, wanted: Sequence[Wanted]) -> Fetch:
        """Have files read: (slots to take one of, kind, name, what to do with a slot once it is
        filled). As many as there are slots for."""
        made = Fetch(time.monotonic() + LONGEST, 0, done=not wanted)
        if made.done:
            return made
        self._memory.settled(finish=True)  # no copy reads or writes a slot that is free now
        coming = {(one.write.kind, one.write.name): one for one in self._reading.values()}
        for slots, kind, name, keep in wanted:
            if (known := coming.get((kind, name))) is not None and known.keep is not None:
                known.fetches.append(made)
                made.left += 1
                continue
            if (slot := slots.reserve()) < 0:
                break
            one = _Writing(slots, kind, slot, name)
            parts = self._memory.parts(kind, slot)
            future = self._readers.submit(self.folder.read, name, kind, parts)
            self._reading[future] = _Bringing(one, [made], keep)
            made.left += 1
        made.done = not made.left
        if not made.done:
            self._fetches.append(made)
        return made

    def forget(self, name: bytes, *kinds: str) -> None:
        """Delete what is there under this name, or on its way there or back."""
        gone = [one for one in self._noted if one.name == name and one.kind in kinds]
        self._noted = [one for one in self._noted if one.name != name or one.kind not in kinds]
        for one in gone:
            one.slots.let(one.slot)
        owed = [one for one in self._owed if one.name != name or one.kind not in kinds]
        self._owed = deque(owed)
        for read in self._reading.values():
            if read.write.name == name and read.write.kind in kinds:
                read.keep = None
        for kind in kinds:
            self._writer.submit(self.folder.forget, name, kind)

    def poll(self, idle: bool = False, seconds: float = 0.0) -> None:
        """Go on with all that is under way. idle: nothing else is to be done, so copies are waited
        for; seconds: to wait for a file."""
        if self._reading and seconds:
            wait(self._reading, seconds, FIRST_COMPLETED)
        for read in [one for one in self._reading if one.done()]:
            self._take(self._reading.pop(read), not read.cancelled() and read.result())
        for written in [one for one in self._writing if one.done()]:
            one = self._writing.pop(written)
            one.slots.let(one.slot)
            self.bytes_written += written.result()
        self._catch_up()
        if self._noted:
            for one in self._noted:
                one.after = self._memory.queued if one.after < 0 else one.after
            ended = self._memory.ended(idle)
            due = [one for one in self._noted if one.after <= ended]
            for one in due:
                given = one.name, one.kind, self._memory.parts(one.kind, one.slot)
                self._writing[self._writer.submit(self.folder.write, *given)] = one
            self._noted = self._noted[len(due) :]  # later ones wait for later copies
        now = time.monotonic()
        for fetch in self._fetches:
            fetch.done = not fetch.left or now > fetch.until
        self._fetches = [one for one in self._fetches if not one.done]
        if self.folder.stopped and not self._told:
            self._told = True
            print(f"warning: --disk-cache {self.folder.stopped}", file=sys.stderr, flush=True)

    def _take(self, read: _Bringing, whole: bool) -> None:
        one = read.write
        for fetch in read.fetches:
            fetch.left -= 1
        if not whole or read.keep is None:
            return one.slots.give(one.slot)
        self.bytes_read += sum(part.nbytes for part in self._memory.parts(one.kind, one.slot))
        read.keep(one.slot)
        if one.kind == "page":
            self.num_read += 1
            for fetch in read.fetches:
                fetch.come.append(one.name)

    def close(self) -> None:
        """Write what is on its way, and leave."""
        self.poll(idle=True)
        while self._owed or self._writing:
            wait(self._writing)
            self.poll(idle=True)
        self._writer.shutdown()
        self._readers.shutdown(cancel_futures=True)
        self.poll()
