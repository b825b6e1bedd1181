"""Places of equal size for things with names: who has which, and who leaves when all are taken."""

from __future__ import annotations

import heapq
from collections import OrderedDict


class Slots:
    """Slots 0 … count − 1. The name used least recently leaves first.

    A slot that a copy is noted for is pinned: it goes to nobody else before `release`, whether its
    name is still known or not.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_evicted = 0
        self._names: OrderedDict[bytes, int] = OrderedDict()  # those used last come last
        self._free = list(range(count))  # a heap: what is saved together lies side by side
        self._pinned: set[int] = set()
        self._left: list[int] = []  # pinned, and nobody's any more

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def touch(self, name: bytes) -> bool:
        """Whether it has a slot; it counts as used just now."""
        if name not in self._names:
            return False
        self._names.move_to_end(name)
        return True

    def pin(self, name: bytes) -> int:
        """The slot of a name that has one."""
        slot = self._names[name]
        self._names.move_to_end(name)
        self._pinned.add(slot)
        return slot

    def take(self, name: bytes) -> int:
        """A slot for a name that has none, pinned; −1 where copies are noted for all of them."""
        assert name not in self._names, "this name has a slot"
        if not self._free:
            oldest = next((n for n, at in self._names.items() if at not in self._pinned), None)
            if oldest is None:
                return -1
            self.num_evicted += 1
            self.drop(oldest)
        slot = self._names[name] = heapq.heappop(self._free)
        self._pinned.add(slot)
        return slot

    def drop(self, name: bytes) -> None:
        """It has a slot no more, if it had one."""
        if (slot := self._names.pop(name, -1)) >= 0:
            if slot in self._pinned:
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
        for slot in self._left:
            heapq.heappush(self._free, slot)
        self._left.clear()

    def names(self) -> list[bytes]:
        """All, those used last at the end."""
        return [*self._names]

    def check(self) -> None:
        """Assert that each slot is free, a name's, or left, and never two of these."""
        held = [*self._names.values(), *self._free, *self._left]
        assert sorted(held) == list(range(self.count))
        assert self._pinned.issuperset(self._left)
