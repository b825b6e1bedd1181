"""Files of several ranks: rank 0 says what goes where, each does it, and tells when it is done.

A job crosses the link after the plan that queued its copies, and is numbered. A slot is done with
once every rank of its group has answered. What one of them has not read, none has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgspec

from ds_runtime.kv.tiers.hand import LOST, DiskHand, EndedFutures

_LOOK = 0.002  # seconds between two looks at own files, while others are waited for


class DiskJob(msgspec.Struct, tag=True, kw_only=True):
    """What the ranks of a group do with a file. way: "write", "read" or "forget"; kinds: of pages
    or states, several where they are to be forgotten."""

    number: int
    group: int
    way: str
    kinds: list[str]
    name: bytes
    slot: int = -1


class DiskDone(msgspec.Struct, tag=True, kw_only=True):
    """A job's end on one rank. nbytes: LOST for a file that was not read. stopped: why this rank
    writes nothing any more."""

    number: int
    nbytes: int
    stopped: str = ""


_decode = msgspec.msgpack.Decoder(DiskDone)


@dataclass(slots=True)
class _Asked:
    """left: answers that are missing."""

    future: Future[int]
    left: int
    lost: bool = False
    nbytes: int = 0


class DiskLink:
    """Rank 0's end for all groups. send: tells all other ranks; told: what they have said, after
    this many milliseconds at most."""

    def __init__(
        self, send: Callable[[msgspec.Struct], None], told: Callable[[int], list[bytes]]
    ) -> None:
        self._send, self._told = send, told
        self._asked: dict[int, _Asked] = {}
        self._lock = Lock()  # own files end in other threads
        self._number = 0
        self.stopped = ""

    def ask(self, job: DiskJob, others: int, own: Future[int] | None) -> Future[int]:
        """Have a job done by this many other ranks, besides what this one does."""
        self._number = job.number = self._number + 1
        asked = _Asked(Future(), others + (own is not None))
        self._asked[job.number] = asked
        self._send(job)
        if own is not None:
            own.add_done_callback(lambda done: self._own_end(job.number, done))
        return asked.future

    def _own_end(self, number: int, done: Future[int]) -> None:
        if (error := done.exception()) is None:
            self._answer(number, done.result())
            return
        with self._lock:
            asked = self._asked.pop(number, None)
        if asked is not None:
            asked.future.set_exception(error)

    def tell(self, job: DiskJob) -> None:
        """Have a job done that nobody waits for."""
        self._send(job)

    def poll(self, milliseconds: int = 0) -> None:
        """Take what other ranks have said."""
        for data in self._told(milliseconds):
            done = _decode.decode(data)
            self.stopped = self.stopped or done.stopped
            self._answer(done.number, done.nbytes)

    def _answer(self, number: int, nbytes: int) -> None:
        with self._lock:
            if (asked := self._asked.get(number)) is None:
                return
            asked.left -= 1
            asked.lost |= nbytes == LOST
            asked.nbytes += max(0, nbytes)
            if asked.left:
                return
            self._asked.pop(number, None)
        asked.future.set_result(LOST if asked.lost else asked.nbytes)

    def wait(self, ended: EndedFutures, seconds: float) -> None:
        """As Hands."""
        until = time.monotonic() + seconds
        while True:
            self.poll()
            left = until - time.monotonic()
            if left <= 0 or ended.wait(min(left, _LOOK)):
                return

    def close(self) -> None:
        """Whoever waits for an answer yet has lost."""
        with self._lock:
            asked, self._asked = self._asked, {}
        for one in asked.values():
            one.future.set_result(LOST)


class LinkedHands:
    """Hands of all ranks of one group. own: rank 0's, where that is one of them; others: how many
    there are besides it."""

    def __init__(self, link: DiskLink, group: int, own: DiskHand | None, others: int) -> None:
        self._link, self._group, self._own, self._others = link, group, own, others

    @property
    def stopped(self) -> str:
        """As Hands."""
        return self._link.stopped or ("" if self._own is None else self._own.stopped)

    def write(self, kind: str, slot: int, name: bytes) -> Future[int]:
        """As Hands."""
        own = None if self._own is None else self._own.write(kind, slot, name)
        return self._link.ask(self._job("write", [kind], name, slot), self._others, own)

    def read(self, kind: str, slot: int, name: bytes) -> Future[int]:
        """As Hands."""
        own = None if self._own is None else self._own.read(kind, slot, name)
        return self._link.ask(self._job("read", [kind], name, slot), self._others, own)

    def forget(self, name: bytes, kinds: Collection[str]) -> None:
        """As Hands."""
        if self._own is not None:
            self._own.forget(name, kinds)
        self._link.tell(self._job("forget", [*kinds], name))

    def _job(self, way: str, kinds: list[str], name: bytes, slot: int = -1) -> DiskJob:
        return DiskJob(number=0, group=self._group, way=way, kinds=kinds, name=name, slot=slot)

    def poll(self, finish: bool = False) -> None:
        """As Hands."""
        if self._own is not None:
            self._own.poll(finish)
        self._link.poll()

    def wait(self, ended: EndedFutures, seconds: float) -> None:
        """As Hands."""
        self._link.wait(ended, seconds)

    def close(self, leaves: bool = False) -> None:
        """As Hands."""
        if self._own is not None:
            self._own.close(leaves)
        self._link.close()


class DiskFollower:
    """Another rank's end. group: its own."""

    def __init__(self, hand: DiskHand, group: int) -> None:
        self._hand, self._group = hand, group
        self._under_way: dict[Future[int], int] = {}  # numbers of their jobs
        self._ended = EndedFutures()

    @property
    def busy(self) -> bool:
        """Whether rank 0 waits for an answer."""
        return bool(self._under_way)

    def take(self, job: DiskJob) -> None:
        """Begin a job, after all plans that came before it."""
        if job.group != self._group:
            return
        if job.way == "forget":
            self._hand.forget(job.name, job.kinds)
            return
        do: Any = self._hand.write if job.way == "write" else self._hand.read
        future = do(job.kinds[0], job.slot, job.name)
        self._under_way[future] = job.number
        self._ended.watch(future)

    def answers(self) -> list[bytes]:
        """What has ended since: messages to rank 0."""
        if not self._under_way:
            return []
        self._hand.poll()
        ended = {self._under_way.pop(one): one for one in self._ended.take()}
        encode, stopped = msgspec.msgpack.encode, self._hand.stopped
        return [
            encode(DiskDone(number=number, nbytes=one.result(), stopped=stopped))
            for number, one in ended.items()
        ]

    def close(self) -> None:
        """Leave: rank 0 has waited for what it wants written."""
        self._hand.close(leaves=True)
