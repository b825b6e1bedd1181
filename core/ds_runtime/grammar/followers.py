"""The threads in which guides follow what was drawn: a step waits for the quick ones alone."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ds_runtime.errors import FieldPath
from ds_runtime.grammar.guide import HEAVY, Followed, Guide
from ds_runtime.platform.cores import work_behind

PATIENCE = 0.004  # seconds that a step waits for guides that were quick so far
_GROW = 0.001  # seconds without a thread for a quick guide until there is another
_IDLE = 10.0  # seconds after which a thread that has nothing to do leaves
_SHARE = 8  # of so many processors, one is for heavy guides


@dataclass(eq=False, slots=True)
class Following:
    """A guide on its way after `tokens`, with `drafts` after these. `found`: where it came to,
    in this many seconds of processor time; `quick`: whether its last mask was.
    """

    guide: Guide
    tokens: Sequence[int]
    drafts: Sequence[int]
    parents: Sequence[int]
    found: Followed | None = None
    seconds: float = 0.0
    quick: bool = True


class Followers:
    """Threads that come as they are needed. `begin` and `wait` are for one thread alone.

    Guides whose last mask was quick have as many as it takes, so that none waits behind one that
    has become heavy; heavy ones wait for each other.
    """

    def __init__(self) -> None:
        told = threading.Event()
        heavy = max(1, (os.cpu_count() or 1) // _SHARE)
        self._told, self._quick, self._heavy = told, _Pool(told), _Pool(told, heavy)
        for pool in (self._quick, self._heavy):
            weakref.finalize(self, pool.close)

    def begin(self, following: Iterable[Following]) -> None:
        """Let guides follow."""
        for one in following:
            one.quick = one.guide.cost < HEAVY
            (self._quick if one.quick else self._heavy).put(one)

    def wait(self, following: Iterable[Following]) -> None:
        """Until the guides that were quick so far are there, or the time is over."""
        self._until([f for f in following if f.quick], PATIENCE, all)

    def wait_any(self, following: Sequence[Following], seconds: float) -> None:
        """Until one is there, or the time is over."""
        self._until(following, seconds, any)

    def _until(
        self,
        following: Sequence[Following],
        seconds: float,
        enough: Callable[[Iterable[bool]], bool],
    ) -> None:
        end = time.perf_counter() + seconds
        while True:
            self._told.clear()
            if enough(f.found is not None for f in following):
                return
            left = end - time.perf_counter()
            if left <= 0:
                return
            if not self._told.wait(min(left, _GROW)):
                self._quick.grow()

    def close(self) -> None:
        """Let the threads leave. May be called twice."""
        self._quick.close()
        self._heavy.close()


class _Pool:
    """Threads that follow in the order of asking, `heavy` of them or as many as `grow` adds.
    `told` is set behind each.
    """

    def __init__(self, told: threading.Event, heavy: int = 0) -> None:
        self._told, self._heavy = told, heavy
        self._asked: SimpleQueue[Following | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = 0  # idle: those that have nothing to do, or are about to begin

    def put(self, one: Following) -> None:
        """Let a guide follow, soon."""
        with self._lock:  # no thread leaves meanwhile
            self._asked.put(one)
            enough = self._threads >= max(1, self._heavy)
        if not enough:
            self.grow()

    def grow(self) -> None:
        """Another thread, if somebody waits for one. Where idle ones wait for a processor, more of
        them would but wait as well, and each later has something to do often enough to stay."""
        with self._lock:
            full = 0 < self._heavy <= self._threads
            if full or self._asked.qsize() <= self._idle:
                return
            self._threads += 1
            self._idle += 1
        threading.Thread(target=self._run, name="guides", daemon=True).start()

    def close(self) -> None:
        """Let every thread leave."""
        for _ in range(self._threads):
            self._asked.put(None)

    def _run(self) -> None:
        if self._heavy:
            work_behind()
        while True:
            try:
                one = self._asked.get(timeout=_IDLE)
            except Empty:
                with self._lock:
                    if self._asked.empty():
                        self._threads -= 1
                        self._idle -= 1
                        return
                continue
            if one is None:
                return
            with self._lock:
                self._idle -= 1
            if self._heavy:
                self.grow()  # who asked before that took this one for idle, and asks once
            one.found = _follow(one)
            with self._lock:
                self._idle += 1
            if self._heavy or self._asked.empty():  # a step waits for all that are quick
                self._told.set()


def _follow(one: Following) -> Followed:
    begin = time.thread_time()
    try:
        return one.guide.follow(one.tokens, one.drafts, one.parents)
    except Exception as e:  # else its owner would wait for ever
        said = f" cannot be followed any further: {type(e).__name__}: {e}"
        return Followed(0, (FieldPath.of(one.guide.param), said))
    finally:
        one.seconds = time.thread_time() - begin
