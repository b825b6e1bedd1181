"""The threads in which guides follow what was drawn: a step waits for the quick ones alone."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ds_runtime.grammar.guide import HEAVY, Followed, Guide

PATIENCE = 0.004  # seconds that a step waits for guides that were quick so far
_GROW = 0.001  # seconds without a thread for a guide until there is another
_IDLE = 10.0  # seconds after which a thread that has nothing to do leaves


@dataclass(eq=False, slots=True)
class Following:
    """A guide on its way behind `tokens`, with `drafts` behind these. `found`: where it came to,
    in so many seconds of processor time; `quick`: whether its last mask was.
    """

    guide: Guide
    tokens: Sequence[int]
    drafts: Sequence[int]
    parents: Sequence[int]
    found: Followed | None = None
    seconds: float = 0.0
    quick: bool = True


class Followers:
    """Threads that come as they are needed. `wait` and `begin` are for one thread alone."""

    def __init__(self) -> None:
        self._pool = _Pool()
        weakref.finalize(self, self._pool.close)

    def begin(self, following: Sequence[Following]) -> None:
        """Let guides follow, the quickest first."""
        for one in sorted(following, key=lambda f: f.guide.cost):
            one.quick = one.guide.cost < HEAVY
            self._pool.asked.put(one)
        if following:
            self._pool.grow(at_most=1)

    def wait(self, following: Sequence[Following]) -> None:
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
        while not enough(f.found is not None for f in following):
            left = end - time.perf_counter()
            if left <= 0:
                return
            self._pool.told.clear()
            if enough(f.found is not None for f in following):
                return
            if not self._pool.told.wait(min(left, _GROW)):
                self._pool.grow()

    def close(self) -> None:
        """Let the threads leave. May be called twice."""
        self._pool.close()


class _Pool:
    """What the threads know; no Followers, which may be forgotten while they wait."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[Following | None] = SimpleQueue()
        self.told = threading.Event()
        self._lock = threading.Lock()
        self._threads = 0

    def grow(self, at_most: int = 1 << 10) -> None:
        """Another thread, if somebody waits for one."""
        with self._lock:
            if self._threads >= at_most or self.asked.empty():
                return
            self._threads += 1
        threading.Thread(target=self._run, name="guides", daemon=True).start()

    def close(self) -> None:
        """Let every thread leave."""
        for _ in range(self._threads):
            self.asked.put(None)

    def _run(self) -> None:
        while True:
            try:
                one = self.asked.get(timeout=_IDLE)
            except Empty:
                with self._lock:
                    if self.asked.empty():
                        self._threads -= 1
                        return
                continue
            if one is None:
                return
            one.found = _follow(one)
            self.told.set()


def _follow(one: Following) -> Followed:
    begin = time.thread_time()
    try:
        return one.guide.follow(one.tokens, one.drafts, one.parents)
    except Exception as e:  # else its owner would wait for ever
        said = f"{one.guide.param} cannot be followed any further: {type(e).__name__}: {e}"
        return Followed(0, said)
    finally:
        one.seconds = time.thread_time() - begin
