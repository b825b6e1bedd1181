"""Parts of a recorded step, as they are run again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.api import Recorded
from ds_runtime_cpu.native import calls

_CODE = {torch.float32: 0, torch.bfloat16: 1}


class Call(NamedTuple):
    """One native function, and its arguments in 8 bytes each."""

    address: int
    slots: bytes


def together(run: Iterable[Call]) -> Callable[[], None]:
    """Native calls that follow each other, as one."""
    run = tuple(run)
    slots: npt.NDArray[np.int64] = np.frombuffer(b"".join(call.slots for call in run), np.int64)
    begins = np.cumsum([0, *(len(call.slots) for call in run)])[:-1] + slots.ctypes.data
    table = np.stack(([call.address for call in run], begins), 1).astype(np.int64)
    replay, where, count = calls().replay, table.ctypes.data, len(run)

    def part(kept: tuple[Any, ...] = (slots, table)) -> None:
        replay(where, count)

    return part


def again(op: Recorded) -> Callable[[], None]:
    """One op of torch, into the tensors that it made."""
    function, args, kwargs, made = op
    if not made:
        return lambda: function(*args, **kwargs)
    if (into := _out(function)) is not None and len(made) == 1:
        ((_, out),), names = made, _names(into)
        rest = {key: value for key, value in kwargs.items() if key in names}
        return lambda: into(*args, **rest, out=out)

    def copied() -> None:
        results = function(*args, **kwargs)
        results = results if isinstance(results, tuple | list) else (results,)
        for i, tensor in made:
            tensor.copy_(results[i])

    return copied


def _names(function: Any) -> set[str]:
    return {argument.name for argument in function._schema.arguments}


def _out(function: Any) -> Any:
    """The overload that writes where it is told, if there is one with the same arguments."""
    overload = function._overloadname
    name = "out" if overload == "default" else f"{overload}_out"
    found = getattr(function._overloadpacket, name, None)
    return found if found is not None and _names(found) - _names(function) == {"out"} else None


def lowered(op: Recorded) -> list[Call] | None:
    """The small ops between native calls as such; None for another, or other dtypes."""
    rule = _RULES.get(str(op.op._schema.name))
    return None if rule is None or op.op._overloadname.endswith("out") else rule(op)


def _cat(op: Recorded) -> list[Call] | None:
    parts, dim = op.args[0], op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    ((_, out),) = op.made
    if any(part.dim() != out.dim() for part in parts):
        return None  # an empty one, which torch leaves out
    found, at = list[Call](), 0
    for part in parts:
        copy = _copy(out.narrow(dim, at, part.shape[dim]), part)
        if copy is None:
            return None
        found, at = found + copy, at + part.shape[dim]
    return found


def _copied(op: Recorded) -> list[Call] | None:
    to, source = op.args[:2]
    return _copy(to, source.expand_as(to)) if isinstance(source, Tensor) else None


def _copy(to: Tensor, source: Tensor) -> list[Call] | None:
    """source, of the same shape, into `to`."""
    there, here = _strides(to), _strides(source)
    if there is None or here is None or {to.dtype, source.dtype} - _CODE.keys():
        return None
    sizes = (1,) * (3 - to.dim()) + tuple(to.shape)
    codes = _CODE[source.dtype], _CODE[to.dtype]
    where = source.data_ptr(), *here, to.data_ptr(), *there
    return [Call(*calls().prepared("copy", *codes, *where, *sizes))]


def _strides(x: Tensor) -> Sequence[int] | None:
    """Of the two dims before the last, whose elements lie together."""
    if not 1 <= x.dim() <= 3 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return None
    return (0,) * (3 - x.dim()) + x.stride()[:-1]


def _added(op: Recorded) -> list[Call] | None:
    y, x = op.args[:2]
    plain = isinstance(x, Tensor) and op.kwargs.get("alpha", 1) == 1 and x.shape == y.shape
    if not plain or y.dim() != 2 or y.dtype != x.dtype or y.dtype not in _CODE:
        return None
    if y.stride(1) != 1 or x.stride(1) != 1:
        return None
    where = y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0)
    return [Call(*calls().prepared("add", _CODE[y.dtype], *where, *y.shape))]


def _selected(op: Recorded) -> list[Call] | None:
    table, dim, rows = op.args
    ((_, out),) = op.made
    if dim != 0 or rows.dtype != torch.int64 or not (rows.is_contiguous() and out.is_contiguous()):
        return None
    if table.dim() < 1 or not table[:1].is_contiguous():
        return None
    size = table.dtype.itemsize
    held, row = table.shape[0], out[:1].numel() * size
    ids = rows.data_ptr(), table.data_ptr(), table.stride(0) * size, 0, held
    return [Call(*calls().prepared("embed", *ids, out.data_ptr(), row, rows.numel()))]


_RULES: dict[str, Callable[[Recorded], list[Call] | None]] = {
    "aten::cat": _cat,
    "aten::copy_": _copied,
    "aten::add_": _added,
    "aten::index_select": _selected,
}
