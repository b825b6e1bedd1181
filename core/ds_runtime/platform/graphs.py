"""Captured steps over torch's graphs: for platforms to hand out. Nothing here knows a vendor.

Every device that torch captures on has the same interface, in a module of the device's name
(`torch.NAME`). It has `Stream`, `stream`, `current_stream`, `synchronize`, and a graph class with
`capture_begin`, `capture_end`, `replay` and `pool`. For branches a stream has `wait_stream`,
`wait_event` and `record_event`.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_runtime.ops.binding.branch import branching

if TYPE_CHECKING:
    import torch


def borrowed(x: torch.Tensor) -> torch.Tensor:
    """The same values where they lie, without keeping their memory: of what a capture allocated,
    whose backend holds it as long as there are replays.
    """
    import torch

    there = x.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        there.data_ptr(), x.device, there.nbytes()
    )
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(storage, x.storage_offset(), x.shape, x.stride())


@dataclass
class _Branch:
    """What was queued on another stream. work: kept, so that nothing it reads is freed before."""

    runtime: Any
    device: torch.device
    work: Callable[[], Any]
    made: Any
    done: Any

    def __call__(self) -> Any:
        self.runtime.current_stream(self.device).wait_event(self.done)
        return self.made


class TorchGraphs:
    """GraphBackend. Captures on one side stream, into one memory pool.

    runtime: torch's module of the device. graph: the name of its graph class. branches: captures
    hold work of `ops.branch` in parallel with what follows it, on a stream of its own.
    """

    def __init__(
        self, runtime: Any, graph: str, device: torch.device, branches: bool = False
    ) -> None:
        self._runtime, self._device = runtime, device
        self._graph = getattr(runtime, graph)
        self._stream = runtime.Stream(device)
        self._beside = runtime.Stream(device) if branches else None
        self._ends: list[Any] = []  # of the branches of the capture that is under way
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend."""
        graph = self._graph()
        # A pool ends with the last graph in it: its number must not be given again.
        pool = next((g.pool() for g in self._graphs), None)
        self._runtime.synchronize(self._device)
        collects = gc.isenabled()
        gc.disable()  # a tensor freed while a capture is under way would break it
        try:
            with ExitStack() as stack:
                stack.enter_context(self._runtime.stream(self._stream))
                stack.enter_context(warnings.catch_warnings())
                if self._beside is not None:
                    stack.enter_context(branching(self._fork))
                warnings.filterwarnings("ignore", r"The \w+ Graph is empty")  # as of no rows
                graph.capture_begin(pool=pool)
                try:
                    run()
                except BaseException:
                    for done in self._ends:  # else the end says that they were not joined
                        self._runtime.current_stream(self._device).wait_event(done)
                    raise
                finally:
                    self._ends.clear()
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self._graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def _fork(self, work: Callable[[], Any]) -> _Branch:
        """What it allocates is reused by later branches alone: each begins behind all that was
        queued before it, so behind what has read the results of earlier ones.
        """
        runtime, device, beside = self._runtime, self._device, self._beside
        assert beside is not None
        beside.wait_stream(runtime.current_stream(device))
        with runtime.stream(beside):
            try:
                made = work()
            finally:
                done = beside.record_event()
                self._ends.append(done)
        return _Branch(runtime, device, work, made, done)
