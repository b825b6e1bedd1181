"""XPU graphs as the engine's graph backend."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


class XpuGraphs:
    """Captures on one side stream, into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.xpu.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend."""
        graph = torch.xpu.XPUGraph()
        torch.xpu.synchronize(self._device)
        collects = gc.isenabled()
        gc.disable()  # a tensor freed while a capture is under way would break it
        try:
            with torch.xpu.stream(self._stream):
                graph.capture_begin(pool=self._pool)
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self._pool = graph.pool()
        return graph.replay
