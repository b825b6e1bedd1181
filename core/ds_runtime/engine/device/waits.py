"""How long a rank waits for the others in a step: what tells which rank comes last."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch

from ds_runtime.parallel.link.messages import Waited

EVERY: Final = 32
"""Of so many steps one is measured, so that it costs nothing."""

_KEPT = 4  # measured steps that are still under way


class Waits:
    """Of one rank. comm: the communicator of all ranks. asynchronous: the device computes while
    the host continues.

    Where it does not, collectives return when they are over, and the communicator counts their
    seconds (`TorchCommunicator.waited`). Where it does, the whole step is measured on the device:
    ranks end it together, as its last collective brings logits to all, so whoever began first has
    waited longest. Values of one rank alone mean nothing: ranks are compared. Nothing is measured
    where the communicator does not count, or events of the device have no times: `serves` says so.
    """

    def __init__(self, comm: Any, asynchronous: bool, device: torch.device) -> None:
        self._device, self._asynchronous = device, asynchronous
        self._counted: Any = getattr(comm, "waited", None)
        self.serves = comm.size > 1 and (asynchronous or self._counted is not None)
        self._step: int | None = None  # that is being launched, if it is measured
        self._before = 0.0
        self._begin: Any = None
        self._done = deque[Waited](maxlen=_KEPT)
        self._queued = deque[tuple[int, Any, Any]](maxlen=_KEPT)

    def begin(self, step: int) -> None:
        """The step with this number is about to be launched; negative ones are not of requests."""
        if step < 0 or step % EVERY or not self.serves:
            return
        self._step = step
        if self._asynchronous:
            self._begin = self._now()
        else:
            self._before = self._counted.seconds

    def end(self) -> None:
        """It has been launched."""
        if (step := self._step) is None:
            return
        self._step = None
        if not self._asynchronous:
            self._done.append(Waited(step, self._counted.seconds - self._before))
        elif self._begin is not None and (end := self._now()) is not None:
            self._queued.append((step, self._begin, end))

    def _now(self) -> Any:
        """An event that the device comes to; None, and nothing is measured, where it has none."""
        try:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
        except RuntimeError:
            self.serves = False
            return None
        return event

    def take(self) -> list[Waited]:
        """What is known of steps since the last call. Never waits."""
        if not self._queued and not self._done:
            return []
        try:
            while self._queued and self._queued[0][2].query():
                step, begin, end = self._queued.popleft()
                self._done.append(Waited(step, begin.elapsed_time(end) / 1000))
        except RuntimeError:  # events that can be recorded, and have no times
            self.serves = False
            self._queued.clear()
        found = [*self._done]
        self._done.clear()
        return found
