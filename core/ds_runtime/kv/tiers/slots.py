"""Places of equal size for things with names: who has which, and who leaves when all are taken."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict


class TierSlots:
    """Slots 0 … count − 1. The name used least recently leaves first.

    A slot that a copy is noted for is pinned: it goes to nobody else before `release`, whether its
    name is still known or not. One that a thread reads or fills is kept, until `let`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_evicted = 0
        self._names: OrderedDict[bytes, int] = OrderedDict()  # those used last come last
        self._free = list(range(count))  # a heap: what is saved together lies side by side
        self._pinned: set[int] = set()
        self._kept: Counter[int] = Counter()
        self._reserved: set[int] = set()  # kept, and nobody's yet
        self._left: list[int] = []  # pinned or kept, and nobody's any more

    def __contains__(self, name: bytes) -> bool:
        """Whether it has a slot. Any thread may ask, and the answer is old by then."""
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def touch(self, name: bytes) -> bool:
        """Whether it has a slot; it counts as used just now."""
        if name not in self._names:
            return False
        self._names.move_to_end(name)
        return True

    def find(self, name: bytes) -> int:
        """Its slot, −1 if it has none. It does not count as used."""
        return self._names.get(name, -1)

    def pin(self, name: bytes) -> int:
        """The slot of a name that has one."""
        slot = self._names[name]
        self._names.move_to_end(name)
        self._pinned.add(slot)
        return slot

    def take(self, name: bytes) -> int:
        """A slot for a name that has none, pinned; −1 where copies are noted for all of them."""
        assert name not in self._names, "this name has a slot"
        if (slot := self._empty()) >= 0:
            self._names[name] = slot
            self._pinned.add(slot)
        return slot

    def _empty(self) -> int:
        if not self._free:
            used = self._names.items()
            oldest = next((n for n, at in used if not self._is_held(at)), None)
            if oldest is None:
                return -1
            self.num_evicted += 1
            self.drop(oldest)
        return heapq.heappop(self._free)

    def _is_held(self, slot: int) -> bool:
        return slot in self._pinned or slot in self._kept

    def keep(self, slot: int) -> None:
        """A thread reads it."""
        self._kept[slot] += 1

    def let(self, slot: int) -> None:
        """The thread is done."""
        self._kept[slot] -= 1
        if not self._kept[slot]:
            del self._kept[slot]
        self._sweep()

    def reserve(self) -> int:
        """A slot that a thread fills: then `adopt` it, or `give` it. −1 where none can be had."""
        if (slot := self._empty()) >= 0:
            self._reserved.add(slot)
            self.keep(slot)
        return slot

    def adopt(self, name: bytes, slot: int) -> bool:
        """It is this name's, unless that has one by now; whether it is."""
        if name in self._names:
            self.give(slot)
            return False
        self._reserved.remove(slot)
        self._names[name] = slot
        self.let(slot)
        return True

    def give(self, slot: int) -> None:
        """It is free again."""
        self._reserved.remove(slot)
        self._left.append(slot)
        self.let(slot)

    def drop(self, name: bytes) -> None:
        """It has a slot no more, if it had one."""
        if (slot := self._names.pop(name, -1)) >= 0:
            if self._is_held(slot):
                self._left.append(slot)
            else:
                heapq.heappush(self._free, slot)

    def clear(self) -> None:
        """No name has one."""
        for name in [*self._names]:
            self.drop(name)

    def release(self) -> None:
        """Every copy that was noted is queued: nothing is pinned."""
        self._pinned.clear()
        self._sweep()

    def _sweep(self) -> None:
        for slot in [one for one in self._left if not self._is_held(one)]:
            self._left.remove(slot)
            heapq.heappush(self._free, slot)

    def names(self) -> list[bytes]:
        """All, those used last at the end."""
        return [*self._names]

    def check(self) -> None:
        """Assert that each slot is free, a name's, or left, and never two of these."""
        held = [*self._names.values(), *self._free, *self._left, *self._reserved]
        assert sorted(held) == list(range(self.count))
        assert all(self._is_held(slot) for slot in (*self._left, *self._reserved))
