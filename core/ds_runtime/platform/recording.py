"""Records torch ops as they run, to run them again on the very tensors of the recording.

As on a device, what the host decided stays as it was, and a recording in which somebody would wait
for a device, or look at values, is refused. For graph backends: of tests, and of platforms whose
device is the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_WAITS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "item"}
    | {"lift_fresh", "equal", "is_nonzero", "repeat_interleave"}
    | {"allclose", "bincount", "argwhere", "unique_consecutive"}
)
_READS = frozenset(
    {"tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
    | {"__array__", "__dlpack__"}
)


class CaptureError(RuntimeError):
    """A step cannot be captured: it would wait for the device, or read values."""


class Recorded(NamedTuple):
    """One torch op that ran: op(*args, **kwargs). made: (place among the results, tensor) of each
    result that is a new tensor, no view and no argument.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, Tensor], ...]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. To say so at run time would cost torch's compiler, a second."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        _refuse(func, args)
        used = {_memory(t) for t in tensors_of((args, kwargs))}

        def kept(t: Tensor) -> Tensor:
            return t if _memory(t) in used else self._recording.keep(func, t)

        result = tree_map_only(Tensor, kept, func(*args, **kwargs))
        made = tuple((i, t) for i, t in enumerate(tensors_of(result)) if _memory(t) not in used)
        if made or func._schema.is_mutable:  # else a view: it shows what its base holds
            self._recording.note(Recorded(func, args, kwargs, made))
        return result


class _HostReads(TorchFunctionMode):
    """Reads of a tensor's values that are no op."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

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
        found = func(*args, **(kwargs or {}))
        if name == "data_ptr":
            self._recording.handed_out(args[0])
        return found


def tensors_of(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> int:
    """The address of its storage; 0 for one of a library's own layout, such as packed weights."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _refuse(func: Any, args: tuple[Any, ...]) -> None:
    name = func._schema.name.removeprefix("aten::")
    if name == "repeat_interleave" and "Tensor" not in func._overloadname:
        return  # by one number, which is the host's
    masks = name.startswith("index") and any(t.dtype == torch.bool for t in tensors_of(args[1:2]))
    if name in _WAITS or masks:
        raise CaptureError(f"{name} waits for the device")


class Recording:
    """Torch ops between `begin` and `end`, to run again. Raises CaptureError where a device could
    not record what is asked of it.
    """

    def __init__(self) -> None:
        self._modes = contextlib.ExitStack()
        self.ops: list[Recorded] = []

    def begin(self) -> None:
        """Every op from here on is recorded."""
        self._modes.enter_context(_HostReads(self))
        self._modes.enter_context(_Recorder(self))

    def end(self) -> None:
        """What was recorded is complete."""
        self._modes.close()

    def note(self, op: Recorded) -> None:
        """An op has run that computed something, or allocated."""
        self.ops.append(op)

    def keep(self, op: Any, made: Tensor) -> Tensor:
        """Of a new tensor, the one that stands for it; for backends with memory of their own."""
        return made

    def handed_out(self, tensor: Tensor) -> None:
        """Somebody asked for a tensor's address; for backends that see who uses it."""

    def replay(self) -> None:
        """The same ops on the same tensors."""
        for op, args, kwargs, made in self.ops:
            results = list(tensors_of(op(*args, **kwargs)))
            for i, tensor in made:
                tensor.copy_(results[i])
