"""A device that copies when it is asked whether it has."""

from __future__ import annotations

import torch

from ds_runtime.checkpoint import staging


class LateDevice:
    """Copies happen when an event behind them is awaited, and no sooner."""

    def __init__(self, monkeypatch):
        self.queue = []
        monkeypatch.setattr(staging, "page_locked", lambda n: torch.zeros(n, dtype=torch.uint8))
        monkeypatch.setattr(staging, "event_on", lambda device: self.event())

    def event(self):
        queue, upto = self.queue, len(self.queue)

        class Event:
            def synchronize(self):
                for i in range(upto):
                    queue[i]()

        return Event()

    def tensor(self, size):
        device, held = self, torch.zeros(size, dtype=torch.uint8)

        class There:
            data = held

            def copy_(self, filled, non_blocking):
                assert non_blocking
                done = []
                device.queue.append(lambda: done or (held.copy_(filled), done.append(1)))

        return There()
