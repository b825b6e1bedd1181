"""One rank's host memory below its caches, and the copies that a plan asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from ds_runtime.kv.caches import apart, copy_states
from ds_runtime.ops.contracts.caches import Caches, LaidGroup
from ds_runtime.platform.page_copies import Copying, LayerBlocks, PageCopies

Pairs = Sequence[tuple[int, int]]


class _Held(NamedTuple):
    """One layer's cache and its host memory: [slots, bytes of a block] uint8. seen: its bytes."""

    layer: int
    laid: LaidGroup
    cache: Tensor
    host: Tensor
    seen: memoryview

    def part(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        size = self.laid.page_bytes
        return self.seen[slot * size : (slot + 1) * size]

    def blocks(self, run: Sequence[tuple[int, int]]) -> LayerBlocks:
        """(block, slot), of which the slots lie side by side."""
        numbers, host = [block for block, _ in run], self.host[run[0][1] : run[-1][1] + 1]
        return LayerBlocks(self.cache, self.laid.layout, numbers, host)


@dataclass(slots=True)
class Moved:
    """Bytes that were copied, and seconds until that was seen."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Moving:
    """Copies under way. lasts: the last one of each layer; last: of all."""

    copying: Copying
    lasts: dict[int, int]
    last: int
    moved: Moved
    nbytes: int
    begin: float
    number: int = 0

    def layer(self, layer: int) -> None:
        """What is queued from now on runs once this layer is there."""
        if (last := self.lasts.get(layer)) is not None:
            self.copying.wait(last)

    def wait(self) -> None:
        """What is queued from now on runs once all is there."""
        self.copying.wait(self.last)

    def counted(self) -> bool:
        """Whether it has ended, and is counted then."""
        if not self.copying.ended(self.last):
            return False
        self.moved.nbytes += self.nbytes
        self.moved.seconds += time.perf_counter() - self.begin
        return True


class HostCopies:
    """pages, states: slots for either. Memory is taken here, layer by layer."""

    def __init__(self, caches: Caches, pages: int, states: int, copies: PageCopies) -> None:
        self._caches, self._copies = caches, copies

        history = [pair for pair in caches.groups if not pair[0].group.per_request]
        self._pages = _held(history, pages, copies)
        self._states = _held(caches.states, states, copies)
        self._saving: _Moving | None = None  # what the next step waits for
        self._under_way: list[_Moving] = []
        self.queued = 0  # the number of the last copies, which end in their order
        self.saved, self.loaded = Moved(), Moved()

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return sum(one.host.nbytes for one in (*self._pages, *self._states))

    def begin(self, saves: Pairs, loads: Pairs, hurried: bool) -> None:
        """Queue (page, slot) to the host and (slot, page) from there, in front of a step, as if in
        this order. hurried: the step waits for the first, too."""
        self.look()
        slots, pages = {slot for _, slot in saves}, {page for page, _ in saves}
        if hurried or any(slot in slots or page in pages for slot, page in loads):
            self._save(saves)
            if hurried:
                self.end()
            self._load(loads)
        else:  # copies run in their order: who waits for loads does not wait for others' saves
            self._load(loads)
            self._save(saves)

    def _save(self, saves: Pairs) -> None:
        if saves:
            self._saving = self._queue(self._copies.save, self._pages, saves, self.saved)

    def _load(self, loads: Pairs) -> None:
        if loads:
            pairs = [(page, slot) for slot, page in loads]
            self._caches.arriving = self._queue(self._copies.load, self._pages, pairs, self.loaded)

    def move_states(self, copies: Pairs) -> None:
        """Make (source, target) of blocks of every state group, one after the other; −1 − n is slot
        n of host memory."""
        for some in apart(copies):
            if here := [(s, t) for s, t in some if s >= 0 and t >= 0]:
                copy_states(self._caches, here)
            if out := [(s, -1 - t) for s, t in some if t < 0]:
                self._queue(self._copies.save, self._states, out, self.saved).wait()
            if back := [(t, -1 - s) for s, t in some if s < 0]:
                self._queue(self._copies.load, self._states, back, self.loaded).wait()

    def end(self) -> None:
        """What is queued from now on runs once the pages of the last `begin` are saved, and all of
        those that come are there."""
        if self._saving is not None:
            self._saving.wait()
            self._saving = None
        if self._caches.arriving is not None:
            self._caches.arriving.wait()
            self._caches.arriving = None

    def seconds(self, pages: int) -> float:
        """To load one of this many pages, before there are requests."""
        pairs = [(page, page) for page in range(min(pages, len(self._pages[0].host)))]
        layers = [one.blocks(run) for one in self._pages for run in _runs(pairs)]
        took = list[float]()
        for _ in range(3):
            begin = time.perf_counter()
            self._copies.load(layers).finish()
            took.append(time.perf_counter() - begin)
        return min(took) / len(pairs)

    @property
    def page_bytes(self) -> int:
        """Of one page of every layer."""
        return sum(one.laid.page_bytes for one in self._pages)

    def parts(self, kind: str, slot: int) -> list[memoryview]:
        """The memory of a slot for a "page" or a "state", layer by layer."""
        held = self._pages if kind == "page" else self._states
        return [one.part(slot) for one in held]

    def ended(self, finish: bool) -> int:
        """The number of the last copies that have ended, as all before them. finish: all do."""
        for one in self._under_way if finish else ():
            one.copying.finish()
        self.look()
        return self._under_way[0].number - 1 if self._under_way else self.queued

    def look(self) -> None:
        """Count the copies that have ended since."""
        self._under_way = [one for one in self._under_way if not one.counted()]

    def _queue(
        self,
        copy: Callable[[Sequence[LayerBlocks]], Copying],
        held: Sequence[_Held],
        pairs: Pairs,
        moved: Moved,
    ) -> _Moving:
        """Of (block, slot)."""
        begin, runs = time.perf_counter(), _runs(pairs)
        layers = [one.blocks(run) for one in held for run in runs]
        lasts = {one.layer: len(runs) * (n + 1) - 1 for n, one in enumerate(held)}
        size = len(pairs) * sum(one.laid.page_bytes for one in held)
        queued = _Moving(copy(layers), lasts, len(layers) - 1, moved, size, begin)
        self.queued = queued.number = self.queued + 1
        if not queued.counted():
            self._under_way.append(queued)
        return queued


def _held(
    groups: Iterable[tuple[LaidGroup, Mapping[int, Tensor]]], slots: int, copies: PageCopies
) -> list[_Held]:
    """The layers of all groups, in the order in which a step needs them."""
    found = list[_Held]()
    for laid, made in groups:
        for layer, cache in made.items():
            host = copies.buffer(slots, laid.page_bytes)
            found.append(_Held(layer, laid, cache, host, host.view(-1).numpy().data))
    return sorted(found, key=lambda one: one.layer)


def _runs(pairs: Pairs) -> list[list[tuple[int, int]]]:
    """(block, slot) of slots that lie side by side, which are one copy."""
    ordered = sorted(pairs, key=lambda pair: pair[1])
    found = groupby(enumerate(ordered), key=lambda one: one[1][1] - one[0])
    return [[pair for _, pair in run] for _, run in found]
