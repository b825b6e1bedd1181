"""One rank's host memory behind its caches, and the copies that a plan asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from ds_runtime.kv.caches import apart, copy_states
from ds_runtime.ops.contracts.caches import Caches, LaidGroup
from ds_runtime.platform.page_copies import Copying, LayerBlocks, PageCopies

Pairs = Sequence[tuple[int, int]]


class _Held(NamedTuple):
    """One layer's cache and its host memory: [slots, bytes of a block] uint8."""

    layer: int
    laid: LaidGroup
    cache: Tensor
    host: Tensor


class HostCopies:
    """pages, states: slots for either. Memory is taken here, layer by layer."""

    def __init__(self, caches: Caches, pages: int, states: int, copies: PageCopies) -> None:
        self._caches, self._copies = caches, copies

        history = [pair for pair in caches.groups if not pair[0].group.per_request]
        self._pages = _held(history, pages, copies)
        self._states = _held(caches.states, states, copies)
        self._saving: Copying | None = None
        self._last = -1

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return sum(one.host.nbytes for one in (*self._pages, *self._states))

    def begin(self, saves: Pairs, loads: Pairs, hurried: bool) -> None:
        """Queue (page, slot) to the host and (slot, page) from there, in front of a step. hurried:
        the step waits for the first, too."""
        if saves:
            layers = _layers(self._pages, saves)
            self._saving, self._last = self._copies.save(layers), len(layers) - 1
            if hurried:
                self.end()
        if loads:
            layers = _layers(self._pages, [(page, slot) for slot, page in loads])
            self._copies.load(layers).wait(len(layers) - 1)

    def move_states(self, copies: Pairs) -> None:
        """Make (source, target) of blocks of every state group, one after the other; −1 − n is slot
        n of host memory."""
        for some in apart(copies):
            if here := [(s, t) for s, t in some if s >= 0 and t >= 0]:
                copy_states(self._caches, here)
            if out := [(s, -1 - t) for s, t in some if t < 0]:
                layers = _layers(self._states, out)
                self._copies.save(layers).wait(len(layers) - 1)
            if back := [(t, -1 - s) for s, t in some if s < 0]:
                layers = _layers(self._states, back)
                self._copies.load(layers).wait(len(layers) - 1)

    def end(self) -> None:
        """What is queued from now on runs once the pages of the last `begin` are saved."""
        if self._saving is not None:
            self._saving.wait(self._last)
            self._saving = None


def _held(
    groups: Iterable[tuple[LaidGroup, Mapping[int, Tensor]]], slots: int, copies: PageCopies
) -> list[_Held]:
    """The layers of all groups, in the order in which a step needs them."""
    found = [
        _Held(layer, laid, cache, copies.buffer(slots, laid.page_bytes))
        for laid, made in groups
        for layer, cache in made.items()
    ]
    return sorted(found, key=lambda one: one.layer)


def _layers(held: Iterable[_Held], pairs: Pairs) -> list[LayerBlocks]:
    """Of (block, slot), layer by layer. A copy is of slots that lie side by side."""
    ordered = sorted(pairs, key=lambda pair: pair[1])
    by_run = groupby(enumerate(ordered), key=lambda one: one[1][1] - one[0])
    runs = [[pair for _, pair in run] for _, run in by_run]
    return [
        LayerBlocks(
            one.cache,
            one.laid.layout,
            [block for block, _ in run],
            one.host[run[0][1] : run[-1][1] + 1],
        )
        for one in held
        for run in runs
    ]
