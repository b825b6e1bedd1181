"""Steps as NPU graphs, which torch-npu gives the interface of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch_npu


class NpuGraphs:
    """GraphBackend. One stream and one memory pool for all captures of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch_npu.npu.Stream(device)
        self._pool: Any = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend."""
        graph = torch_npu.npu.NPUGraph()
        torch_npu.npu.synchronize(self._device)
        collects = gc.isenabled()
        gc.disable()  # a tensor freed while a capture is under way would break it
        try:
            with torch_npu.npu.stream(self._stream):
                graph.capture_begin(pool=self._pool)
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay
