"""Stand-ins for what torch and torch-npu know of a device: its memory, streams, graphs and groups.

A step is recorded as ops that torch runs on the CPU, and ranks meet over Gloo. Refusals are the
devices': a capture wants a side stream and a pool that lives, nothing may wait inside one, a
replay wants a capture that ended. A replayed graph stops where it waits for an event from outside,
until that is recorded; a task group is given other arguments on another stream than that of the
capture. A group of ranks wants the backend of its device and a device per rank,
dense tensors, and a dtype that it sums. `CALLS` says what was asked.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections import Counter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack

from ds_runtime.platform.recording import Recorded, Recording, tensors_of
from vendor_doubles import Named, around, double, records, require

VENDORS = {  # plugin → torch's module, its graph class, its group's backend
    "cuda": ("cuda", "CUDAGraph", "nccl"),
    "rocm": ("cuda", "CUDAGraph", "nccl"),
    "npu": ("npu", "NPUGraph", "hccl"),
    "xpu": ("xpu", "XPUGraph", "xccl"),
}
SUMS = {  # what a backend adds up, of the dtypes that models compute in
    "nccl": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "hccl": (torch.float32, torch.bfloat16, torch.float16),
    "xccl": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}
CALLS: Counter[str] = Counter()
FREE, TOTAL = 3 << 30, 8 << 30


class Stream:
    """In a capture, what waits for the stream that it began on belongs to it until that waits."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        require(Graph.under_way is not None and other is not self, "a fork of what is captured")
        Graph.forks[self] = None
        CALLS["forks"] += 1

    def record_event(self) -> object:
        require(self in Graph.forks, "an event of a stream that is captured")
        Graph.forks[self] = event = object()
        Graph.events.add(event)
        return event

    def wait_event(self, event: object) -> None:
        require(self is Graph.current, "the current stream waits")
        require(event in Graph.events, "an event of the capture that is under way")
        for stream, last in list(Graph.forks.items()):
            if last is event:  # what came to the stream behind an earlier one is not waited for
                del Graph.forks[stream]


class Graph:
    """Of any vendor. The pool ends with the last graph in it."""

    under_way: Graph | None = None
    current: Stream | None = None  # None: the default stream
    pools: ClassVar[Counter[int]] = Counter()
    # Streams that the captured one has not waited for, and the event at the end of each.
    forks: ClassVar[dict[Stream, object]] = {}
    events: ClassVar[set[object]] = set()  # of this capture

    def __init__(self) -> None:
        self.recording, self.ended, self.number = Recording(), False, 0

    def __del__(self) -> None:
        Graph.pools[self.number] -= 1

    def capture_begin(self, pool: Any = None) -> None:
        require(Graph.current is not None, "graphs must be captured on a non-default stream")
        require(Graph.under_way is None, "a capture is under way already")
        require(pool is None or Graph.pools[pool[0]] > 0, "the pool has ended with its last graph")
        self.number = len(Graph.pools) + 1 if pool is None else pool[0]
        Graph.pools[self.number] += 1
        Graph.under_way = self
        self.recording.begin()

    def capture_end(self) -> None:
        require(Graph.under_way is self, "no capture is under way")
        Graph.under_way, self.ended = None, True
        self.recording.end()
        forks = len(Graph.forks)
        Graph.forks.clear()
        Graph.events.clear()
        require(not forks, "the capture holds work that was not joined")
        CALLS["captures"] += 1

    def pool(self) -> tuple[int, int]:
        require(self.ended, "a graph has a pool once it is captured")
        return self.number, 0

    def replay(self) -> None:
        require(self.ended and Graph.under_way is None, "replay of a graph that is not captured")
        require(not QUEUE, STUCK)
        queued(self._steps())
        CALLS["replays"] += 1

    def _steps(self) -> Any:
        """Runs, with a stop wherever it waits for an event that is not recorded yet."""
        for recorded in self.recording.ops:
            if isinstance(recorded.op, _Wait):
                while not recorded.op.event.flag:
                    yield
                continue
            results = list(tensors_of(recorded.op(*recorded.args, **recorded.kwargs)))
            for i, tensor in recorded.made:
                tensor.copy_(results[i])


QUEUE: list[Any] = []  # what the device has not done yet, since it waits
STUCK = "the device waits for an event that nobody has recorded"


def queued(steps: Any) -> None:
    QUEUE.append(steps)
    go_on()


def go_on() -> None:
    """As far as the device comes."""
    while QUEUE:
        for _ in QUEUE[0]:
            return
        QUEUE.pop(0)


class _Wait:
    def __init__(self, event: ExternalEvent) -> None:
        self.event = event


def _node(op: Any, *args: Any) -> None:
    """Part of the graph that is captured: nothing of it happens now."""
    assert Graph.under_way is not None
    Graph.under_way.recording.ops.append(Recorded(op, args, {}, ()))


class ExternalEvent:
    """Waited for in a graph, and recorded outside."""

    def __init__(self) -> None:
        self.flag = False

    def wait(self, stream: Any = None) -> None:
        require(Graph.under_way is not None and stream is Graph.current, "the captured stream")
        _node(_Wait(self))

    def reset(self, stream: Any = None) -> None:
        require(Graph.under_way is not None and stream is Graph.current, "the captured stream")
        _node(self._clear)

    def _clear(self) -> None:
        self.flag = False

    def record(self, stream: Any = None) -> None:
        require(Graph.under_way is None, "recorded outside, or the graph waits for itself")
        require(not self.flag, "recorded before the last record was waited for, which loses it")
        self.flag = True
        go_on()


class Event:
    def __init__(self) -> None:
        self.passed = True  # until it is recorded

    def record(self, stream: Any = None) -> None:
        self.passed = False
        queued(self._pass())

    def _pass(self) -> Any:
        self.passed = True
        yield from ()

    def synchronize(self) -> None:
        require(self.passed, STUCK)
        CALLS["waits"] += 1


class Group:
    """A task group of one op, which writes where it is told."""

    open: Group | None = None  # while it is captured
    updated: Group | None = None  # while it is given other arguments

    def __init__(self, stream: Any) -> None:
        self.stream, self.op, self.call = stream, "", None

    def run(self) -> None:
        self.call()


def graph_task_group_begin(stream: Any) -> None:
    require(Graph.under_way is not None and stream is Graph.current, "the captured stream")
    require(Group.open is None, "a task group is open already")
    Group.open = Group(stream)


def graph_task_group_end(stream: Any) -> Any:
    require(Group.open is not None and Group.open.stream is stream, "no task group is open")
    found, Group.open = Group.open, None
    require(found.call is not None, "a task group without an op")
    _node(found.run)
    return found


def graph_task_update_begin(stream: Any, handle: Any) -> None:
    require(Graph.under_way is None and Group.updated is None, "an update of one task group")
    require(stream is Graph.current, "updated on the current stream")
    require(stream is not handle.stream, "updated on another stream than it was captured on")
    Group.updated = handle


def graph_task_update_end(stream: Any) -> None:
    require(Group.updated is not None and stream is Graph.current, "no update is under way")
    Group.updated = None
    CALLS["updates"] += 1


def current_stream(device: Any = None) -> Any:
    return Graph.current


def is_current_stream_capturing() -> bool:
    return Graph.under_way is not None


def call(compute: Any, *args: Any, **kwargs: Any) -> Any:
    """A vendor's op, which a graph holds as one, whatever its stand-in is made of."""
    again, name = functools.partial(compute, *args, **kwargs), getattr(compute, "__name__", "")
    if getattr(compute, "__module__", "") == __name__:  # of the device itself
        return again()
    if Group.updated is not None:
        require(Group.updated.op == name, f"the task is {Group.updated.op}, not {name}")
        Group.updated.call = again
        return None
    graph = Graph.under_way
    if graph is None or not _len_torch_dispatch_stack():  # or a part of one
        return again()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        result = again()
    if Group.open is not None:
        require(result is None, "a task group takes ops that write where they are told")
        require(Group.open.call is None, "one op in a task group")
        Group.open.op, Group.open.call = name, again
        return None
    given = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}
    made = tuple(
        (i, t)
        for i, t in enumerate(tensors_of(result))
        if t.untyped_storage().data_ptr() not in given
    )
    graph.recording.ops.append(Recorded(again, (), {}, made))
    return result


around.append(call)


@contextlib.contextmanager
def stream(stream: Stream) -> Any:
    before, Graph.current = Graph.current, stream
    try:
        yield
    finally:
        Graph.current = before


def synchronize(device: Any = None) -> None:
    require(Graph.under_way is None, "not permitted while a stream is captured")
    require(not QUEUE, STUCK)


def set_device(device: Any) -> None:
    require(device is not None, "a device")
    CALLS["set_device"] += 1


def empty_cache() -> None:
    require(Graph.under_way is None, "not permitted while a stream is captured")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return FREE, TOTAL


def is_initialized() -> bool:
    return True


FUNCTIONS = (stream, synchronize, set_device, empty_cache, mem_get_info, is_initialized)
METHODS = ("capture_begin", "capture_end", "pool", "replay")
TASKS = (
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
    current_stream,
    is_current_stream_capturing,
)
EVENTS = ((ExternalEvent, ("record", "reset", "wait")), (Event, ("record", "synchronize")))


def runtime(vendor: str) -> dict[str, Any]:
    """The attributes of torch's module of a device, each behind the vendor's own signature."""
    module, graph, _ = VENDORS[vendor]
    if module == "npu":
        told = {n.partition(":")[2]: text for n, text in records("torch_npu_device").items()}
    else:
        real = getattr(torch, module)
        told = {
            f.__name__: signature(getattr(real, f.__name__)) for f in (*FUNCTIONS, current_stream)
        }
        told |= {f"{graph}.{m}": signature(getattr(getattr(real, graph), m)) for m in METHODS}
    made = {f.__name__: double(f.__name__, told[f.__name__], f) for f in FUNCTIONS}
    methods = {m: double(m, told[f"{graph}.{m}"], getattr(Graph, m)) for m in METHODS}
    if module == "npu":
        made |= {f.__name__: double(f.__name__, told[f.__name__], f) for f in TASKS}
        for event, names in EVENTS:
            name = event.__name__
            own = {m: double(m, told[f"{name}.{m}"], getattr(event, m)) for m in names}
            made[name] = type(name, (event,), own)
    else:
        made["current_stream"] = double("current_stream", told["current_stream"], current_stream)
    return made | {graph: type(graph, (Graph,), methods), "Stream": Stream}


def signature(function: Any) -> str:
    """As a record has it: without annotations, and names where defaults are no literals."""
    found, none = inspect.signature(function), inspect.Parameter.empty
    plain = [
        p.replace(annotation=none, default=p.default if _literal(p.default) else Named("named"))
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _literal(value: Any) -> bool:
    none = inspect.Parameter.empty
    return value is none or value is None or isinstance(value, str | int | float | bool)


# ---- groups ----


def groups(vendor: str) -> dict[str, Any]:
    """torch.distributed's functions that a communicator calls, over Gloo."""
    module, _, wanted = VENDORS[vendor]
    join, reduce_, gather = dist.init_process_group, dist.all_reduce, dist.all_gather

    def init_process_group(backend, init_method, timeout, world_size, rank, device_id):  # type: ignore[no-untyped-def]
        require(backend == wanted, f"torch's device {module} is joined by {wanted}, not {backend}")
        require(device_id is not None and device_id.type == module, "a device of this kind")
        require(device_id.index is not None, "the device needs an index")
        join("gloo", init_method=init_method, timeout=timeout, world_size=world_size, rank=rank)
        every: list[Any] = [None] * world_size
        dist.all_gather_object(every, device_id.index)
        require(len(set(every)) == world_size, f"duplicate device: ranks have {every}")
        CALLS["joined"] += 1

    def all_reduce(tensor, group):  # type: ignore[no-untyped-def]
        require(tensor.is_contiguous(), "tensors must be contiguous")
        require(tensor.dtype in SUMS[wanted], f"{wanted} does not sum {tensor.dtype}")
        CALLS["all_reduce"] += 1
        reduce_(tensor, group=group)

    def all_gather(tensor_list, tensor, group):  # type: ignore[no-untyped-def]
        every = (*tensor_list, tensor)
        require(all(t.is_contiguous() for t in every), "tensors must be contiguous")
        same = {(t.shape, t.dtype) for t in every}
        require(len(same) == 1, "tensors of one shape and dtype")
        CALLS["all_gather"] += 1
        gather(tensor_list, tensor, group=group)

    functions = (init_process_group, all_reduce, all_gather)
    return {f.__name__: double(f.__name__, signature(getattr(dist, f.__name__)), f)
            for f in functions}  # fmt: skip


def stand_in(vendor: str, put: Any = setattr) -> None:
    """Put all of it in place; `put` may be monkeypatch.setattr, which undoes it."""
    module, _, _ = VENDORS[vendor]
    made = runtime(vendor)
    if module == "npu":
        package = types.ModuleType("torch_npu")
        package.npu = types.SimpleNamespace(config=types.SimpleNamespace(), **made)  # type: ignore[attr-defined]
        sys.modules["torch_npu"] = package
        put(torch, "npu", package.npu)
    else:
        for name, value in made.items():
            put(getattr(torch, module), name, value)
    for name, value in groups(vendor).items():
        put(dist, name, value)
