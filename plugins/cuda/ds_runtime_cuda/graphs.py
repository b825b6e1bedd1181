"""CUDA graphs as the engine's graph backend."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch


class CudaGraphs:
    """Captures on one side stream, into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend."""
        graph = torch.cuda.CUDAGraph()
        # A pool ends with the last graph in it: its number must not be given again.
        pool = next((g.pool() for g in self._graphs), None)
        torch.cuda.synchronize(self._device)
        collects = gc.isenabled()
        gc.disable()  # a tensor freed while a capture is under way would break it
        try:
            with torch.cuda.stream(self._stream), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # as of no rows
                graph.capture_begin(pool=pool)
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self._graphs.add(graph)
        return graph.replay
