"""Bytes of files on their way to a device: through page-locked memory, which it fetches by itself.

So the next bytes are read while the last ones travel, and nothing waits for the device's queue.
"""

from __future__ import annotations

from collections import deque
from functools import cache

import torch
from torch import Tensor

_RING = 64 << 20  # bytes of page-locked memory, which is slow to get
_ALIGN = 512  # of what is copied at once


@cache  # asked several times a step
def shares_memory(device: torch.device | str) -> bool:
    """Whether the device works in the host's memory, in step with the host."""
    return torch.device(device).type == "cpu"


def page_locked(size: int) -> Tensor:
    """Bytes that devices fetch by themselves."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def event_on(device: torch.device) -> torch.Event:
    """What is over when all that is queued on the device now has run."""
    event = torch.Event(device)
    event.record()
    return event


class Staging:
    """A ring of page-locked memory before one device: `room`, fill it, `send`; one at a time.

    most: bytes of one `room`.
    """

    def __init__(self, device: torch.device, size: int = _RING) -> None:
        self.device = device
        self.most = size // 2
        self._ring = page_locked(size)
        self._at = 0
        self._under_way: deque[tuple[int, int, torch.Event]] = deque()  # begin, end, sent

    def room(self, size: int) -> Tensor:
        """`size` bytes to fill, once the device has what lay there before."""
        assert size <= self.most, size
        begin = self._at if self._at + size <= self._ring.shape[0] else 0
        end = begin + size
        while any(begin < last and first < end for first, last, _ in self._under_way):
            self._under_way.popleft()[2].synchronize()
        self._at = -(-end // _ALIGN) * _ALIGN
        return self._ring[begin:end]

    def send(self, filled: Tensor, into: Tensor) -> None:
        """Queue the copy of the last `room` to as many bytes on the device."""
        into.copy_(filled, non_blocking=True)
        begin = int(filled.storage_offset())
        self._under_way.append((begin, begin + len(filled), event_on(self.device)))
