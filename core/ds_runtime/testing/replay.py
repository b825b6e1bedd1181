"""A graph backend without a device: it records torch ops as they run, and runs them again.

As on a device, a replay works on the very tensors of the capture, and what the host decided stays
as it was. A capture in which an op would wait for a device is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "item"}
    | {"lift_fresh", "equal", "is_nonzero", "repeat_interleave"}
)


_READS = frozenset({"tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"})


class CaptureError(RuntimeError):
    """What was captured would wait for the device, or read host memory."""


class _Recorded(NamedTuple):
    """One op with its arguments, and which of its results are new tensors."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, Tensor], ...]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_Recorded] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        _refuse(func, args)
        result = func(*args, **kwargs)
        used = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = tuple(
            (i, t)
            for i, t in enumerate(_tensors(result))
            if t.untyped_storage().data_ptr() not in used
        )
        if made or func._schema.is_mutable:  # else a view: it shows what its base holds
            self.ops.append(_Recorded(func, args, kwargs, made))
        return result


class _HostReads(TorchFunctionMode):
    """Reads of a tensor's values that are no op."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise CaptureError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _refuse(func: Any, args: tuple[Any, ...]) -> None:
    name = func._schema.name.removeprefix("aten::")
    if name == "repeat_interleave" and "Tensor" not in func._overloadname:
        return  # by one number, which is the host's
    masks = name.startswith("index") and any(t.dtype == torch.bool for t in _tensors(args[1:2]))
    if name in _WAITS or masks:
        raise CaptureError(f"{name} waits for the device")


class Recording:
    """Torch ops between `begin` and `end`, to run again. Raises CaptureError where a device could
    not record what is asked of it.
    """

    def __init__(self) -> None:
        self._modes = contextlib.ExitStack()
        self._ops: list[_Recorded] = []

    def begin(self) -> None:
        """Every op from here on is recorded."""
        recorder = _Recorder()
        self._ops = recorder.ops
        self._modes.enter_context(_HostReads())
        self._modes.enter_context(recorder)

    def end(self) -> None:
        """What was recorded is complete."""
        self._modes.close()

    def replay(self) -> None:
        """The same ops on the same tensors."""
        for op, args, kwargs, made in self._ops:
            results = list(_tensors(op(*args, **kwargs)))
            for i, tensor in made:
                tensor.copy_(results[i])


class ReplayBackend:
    """See GraphBackend. `replays` counts, per capture, how often it was replayed."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record `run`; raises CaptureError where a device could not."""
        recording = Recording()
        recording.begin()
        try:
            run()
        finally:
            recording.end()
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[number] += 1
            recording.replay()

        return replay
