"""Captured ops that take numbers from the host: each replay tells their tasks those of its step.

Source: torch-npu's torch_npu/npu/graphs.py and streams.py (ExternalEvent). What is captured between
graph_task_group_begin and _end is a task group; the same op, called between graph_task_update_begin
and _end, gives it other arguments. In front of the group the graph waits for an event from outside,
which is recorded once the group is up to date. Updates run in parallel with the graph, an op ahead
of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_runtime.api import GraphBackend


@dataclass(frozen=True)
class Task:
    """One captured op. event: the graph waits for it in front. call: the op as the host has it now,
    on tensors that never move.
    """

    event: Any
    handle: Any
    call: Callable[[], object]


class TaskGraphs:
    """GraphBackend over another one: a replay also updates the tasks that kernels have added.

    A replay waits on the host until the last one of the same graph has ended, since that one's
    tasks and events are in use until then. runtime: torch_npu.npu.
    """

    def __init__(self, graphs: GraphBackend, runtime: Any) -> None:
        self.graphs = graphs
        self._runtime = runtime
        self._stream = runtime.Stream()  # of updates
        self._scratch: dict[Any, Tensor] = {}
        self._tasks: list[Task] = []

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend."""
        global _under_way
        self._tasks, _under_way = [], self
        try:
            queue = self.graphs.capture(run)
        finally:
            tasks, self._tasks, _under_way = self._tasks, [], None
        return _Replay(self._runtime, self._stream, queue, tasks) if tasks else queue

    def add(self, call: Callable[[], object]) -> None:
        """Capture `call`, which queues one op, as a task of the graph that is captured."""
        event, stream = self._runtime.ExternalEvent(), self._runtime.current_stream()
        event.wait(stream)
        event.reset(stream)
        self._runtime.graph_task_group_begin(stream)
        try:
            call()
        finally:
            handle = self._runtime.graph_task_group_end(stream)
        self._tasks.append(Task(event, handle, call))

    def scratch(self, name: str, like: Tensor) -> Tensor:
        """A dense tensor of the shape and dtype of `like`, for good: tasks keep their addresses.

        All ops of all graphs share what has one name, dtype and shape after the first dimension:
        an op of a graph may use it until the next one does.
        """
        key = name, like.dtype, like.shape[1:]
        held = self._scratch.get(key)
        if held is None or held.shape[0] < like.shape[0]:
            held = self._scratch[key] = like.new_empty(like.shape)
        return held[: like.shape[0]]

    def largest(self, name: str, given: Tensor) -> Tensor:
        """The largest [n] of that name so far, `given` or one before."""
        held = self._scratch.get(name)
        if held is None or held.numel() < given.numel():
            held = self._scratch[name] = given
        return held


class _Replay:
    """Queues a graph, then brings its tasks up to date."""

    def __init__(
        self, runtime: Any, stream: Any, queue: Callable[[], None], tasks: list[Task]
    ) -> None:
        self._runtime, self._stream = runtime, stream
        self._queue, self._tasks = queue, tasks
        self._ended: Any = None  # event behind the last replay

    def __call__(self) -> None:
        if self._ended is None:
            self._ended = self._runtime.Event()
        else:
            self._ended.synchronize()
        self._queue()
        self._ended.record()
        with self._runtime.stream(self._stream):
            left = iter(self._tasks)
            try:
                for task in left:
                    self._update(task)
            finally:
                for task in left:  # an update has failed: the device would wait for ever
                    task.event.record(self._stream)

    def _update(self, task: Task) -> None:
        try:
            self._runtime.graph_task_update_begin(self._stream, task.handle)
            try:
                task.call()
            finally:
                self._runtime.graph_task_update_end(self._stream)
        finally:
            task.event.record(self._stream)


_under_way: TaskGraphs | None = None


def capturing() -> TaskGraphs | None:
    """What captures in this process just now."""
    return _under_way
