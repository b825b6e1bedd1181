"""Between host memory and files: what is saved continues to disk, and what a prompt needs comes
back.

Threads of every rank read and write the slots themselves (`kv.tiers.hand`). Such a slot is kept: it
goes to nobody else before all are done with it. A request whose pages lie on disk waits until they
are in host memory, and others run meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

from ds_runtime.config import EngineConfig
from ds_runtime.kv.tiers.folder import DiskFolder, Sought
from ds_runtime.kv.tiers.hand import LOST, EndedFutures, FileThreads, Hands
from ds_runtime.kv.tiers.slots import TierSlots

LONGEST = 30.0  # seconds that a request waits for the disk
PATIENCE = 60.0  # seconds that whoever closes waits for what is on its way there
_GLANCE = 0.002  # seconds that a step waits to know what a folder has
_LEAST = 4  # a quarter of the slots at most is on its way to the disk


def seconds_to_close(config: EngineConfig) -> float:
    """For which an engine that closes may write to its disk, at most."""
    return 0.0 if config.disk_cache is None else PATIENCE


Wanted = tuple[TierSlots, str, bytes, Callable[[int], object]]  # see `Disk.fetch`
Finding = Callable[[int], Sequence[Wanted]]


@dataclass(slots=True, eq=False)
class Fetch:
    """What one request waits for. left: to know what the disk has, or files. come: names of pages
    that are in host memory by it."""

    until: float
    left: int = 0
    done: bool = False
    come: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Writing:
    slots: TierSlots
    kind: str
    slot: int
    name: bytes


@dataclass(slots=True)
class _Bringing:
    """keep: takes a slot that is filled; None: nobody wants it. fetches: all that wait."""

    write: _Writing
    fetches: list[Fetch]
    keep: Callable[[int], object] | None


class Disk:
    """The way of one group of ranks to a folder. Called by the thread that schedules, which asks
    the disk for nothing itself: one that is on a network may never answer."""

    def __init__(self, folder: DiskFolder, hands: Hands) -> None:
        self.folder, self._hands = folder, hands
        self._noted: list[_Writing] = []  # their copies are queued by the next `poll`
        self._owed: deque[_Writing] = deque()  # slots that are not kept, as the disk lags
        self._writing: dict[Future[int], _Writing] = {}
        self._reading: dict[Future[int], _Bringing] = {}
        self._looking: dict[Future[int], tuple[Fetch, Finding]] = {}
        self._looker = FileThreads(1, "disk cache, looking")
        self._ended = EndedFutures()  # of these
        self._fetches: list[Fetch] = []
        self._late = False  # somebody has waited for longer than is waited for
        self._told = ""
        self.num_read = self.bytes_written = self.bytes_read = 0

    def room(self, slots: TierSlots) -> int:
        """How many more slots may be on their way to the disk."""
        if self.stopped:
            return 0
        return max(1, slots.count // _LEAST) - len(self._noted) - len(self._writing)

    @property
    def busy(self) -> bool:
        """Whether requests wait for it."""
        return bool(self._fetches)

    @property
    def lags(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._noted or self._owed or self._writing or self._is_asked)

    @property
    def _is_asked(self) -> bool:
        return bool(self._reading or self._looking)

    @property
    def left(self) -> int:
        """How many pages and states are not written yet."""
        return len(self._owed) + len(self._writing)

    @property
    def stopped(self) -> str:
        """Why nothing is written any more; "" while it is."""
        return self._hands.stopped

    def go_on(self, seconds: float) -> None:
        """Nothing else is to be done: wait a little for what is on its way."""
        if self._writing or self._is_asked:
            self._hands.wait(self._ended, seconds)
        self.poll(idle=True)

    def save(self, slots: TierSlots, kind: str, slot: int, name: bytes) -> None:
        """A copy to this slot is about to be queued; it continues to the disk. Where that lags, it
        goes later, if nobody else has the slot by then."""
        if self.stopped:
            return
        if self.room(slots) > 0:
            slots.keep(slot)
            self._noted.append(_Writing(slots, kind, slot, name))
        else:
            self._owed.append(_Writing(slots, kind, slot, name))
            if len(self._owed) > 2 * slots.count:  # the oldest have no slot any more
                self._owed.popleft()

    def _catch_up(self) -> None:
        """What the disk lagged behind with, as far as it still has its slot."""
        if self.stopped:
            self._owed.clear()
        while self._owed and self.room(self._owed[0].slots) > 0:
            one = self._owed.popleft()
            if one.slots.find(one.name) == one.slot:
                one.slots.keep(one.slot)
                self._noted.append(one)

    def fetch(self, sought: Iterable[Sought], finding: Finding) -> Fetch:
        """Have files read, as many as there are slots for, and none while the disk hangs. sought:
        pages in a prompt's order, which another thread draws. finding: what to read, once it is
        known how many of these can be had. A tuple for each: (slots to take one of, kind, name,
        what to do with a slot once it is filled)."""
        made = Fetch(time.monotonic() + LONGEST)
        if not (self._late and self._is_asked):
            future = self._looker.submit(partial(self._reach, sought))
            self._looking[future], made.left = (made, finding), 1
            wait([future], _GLANCE)  # most prompts then start with this step
            if future.done():
                self._found(future)
            else:
                self._ended.watch(future)
        made.done = not made.left
        if not made.done:
            self._fetches.append(made)
        return made

    def _reach(self, sought: Iterable[Sought]) -> int:
        try:
            return self.folder.reach(sought)
        except Exception:  # no memory, say: the pages are computed
            return 0

    def _found(self, future: Future[int]) -> None:
        made, finding = self._looking.pop(future)
        made.left -= 1
        if not made.done:
            self._read(made, finding(future.result()))

    def _read(self, made: Fetch, wanted: Sequence[Wanted]) -> None:
        coming = {(one.write.kind, one.write.name): one for one in self._reading.values()}
        for slots, kind, name, keep in wanted:
            if (known := coming.get((kind, name))) is not None and known.keep is not None:
                known.fetches.append(made)
                made.left += 1
                continue
            if (slot := slots.reserve()) < 0:
                break
            future = self._hands.read(kind, slot, name)
            self._reading[future] = _Bringing(_Writing(slots, kind, slot, name), [made], keep)
            self._ended.watch(future)
            made.left += 1

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
        self._hands.forget(name, kinds)

    def poll(self, idle: bool = False, seconds: float = 0.0) -> None:
        """Continue with all that is under way. idle: nothing else is to be done, so copies are
        waited for; seconds: to wait for a file."""
        self._hands.poll(idle)
        if self._is_asked and seconds:
            self._hands.wait(self._ended, seconds)
        for future in self._ended.take():
            if future in self._looking:
                self._found(future)
            elif (read := self._reading.pop(future, None)) is not None:
                self._take(read, future.result())
            else:
                one = self._writing.pop(future)
                one.slots.let(one.slot)
                self.bytes_written += max(0, future.result())
        self._catch_up()
        for one in self._noted:
            future = self._hands.write(one.kind, one.slot, one.name)
            self._writing[future] = one
            self._ended.watch(future)
        self._noted = []
        now = time.monotonic()
        for fetch in self._fetches:
            late = fetch.left > 0 and now > fetch.until
            self._late |= late
            fetch.done = late or not fetch.left
        self._late &= self._is_asked
        self._fetches = [one for one in self._fetches if not one.done]
        if (said := self.stopped) != self._told:  # a file that somebody has to delete comes later
            self._told = said
            print(f"warning: --disk-cache {said}", file=sys.stderr, flush=True)

    def _take(self, read: _Bringing, nbytes: int) -> None:
        one = read.write
        for fetch in read.fetches:
            fetch.left -= 1
        if nbytes == LOST or read.keep is None:
            return one.slots.give(one.slot)
        self.bytes_read += nbytes
        read.keep(one.slot)
        if one.kind == "page":
            self.num_read += 1
            for fetch in read.fetches:
                fetch.come.append(one.name)

    def drain(self, seconds: float = PATIENCE) -> bool:
        """Write what is on its way, for so long at most. Whether all is written."""
        until = time.monotonic() + seconds
        self.poll(idle=True)
        while self.left and (left := until - time.monotonic()) > 0:
            self._hands.wait(self._ended, min(left, 1.0))
            self.poll(idle=True)
        return not self.left

    def close(self, seconds: float = PATIENCE) -> None:
        """The same, and leave."""
        self.drain(seconds)
        for made, _ in self._looking.values():
            made.done = True  # what is found from now on is not read
        self._looker.drop(0)
        self._looker.close(0.0)
        self._hands.close(leaves=self.left > 0)
        self.poll()
        self._looking.clear()  # one that hangs has nothing to give back
