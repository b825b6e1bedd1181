"""Weights as loaders may hand them over: strided, at odd addresses, wrapped again, several at once.

Whatever a kernel knows of a weight must be in the `Weight` and in its `Packed`. What it hangs on a
tensor object or keeps in itself is lost or belongs to another weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.reference.cases import Case
from ds_runtime.ops.weight import Packed
from ds_runtime_kit.checks.inputs import rebuild


def weight_variants(case: Case) -> Iterator[tuple[Case, Callable[[Any], Any]]]:
    """The case with its weight in other clothes, and what is to be around the kernel."""
    pack = case.calls[0]
    if pack.method != "pack":
        return
    for label, change in _CLOTHES.items():
        args = (rebuild(pack.args[0], _of_tensors(change)), *pack.args[1:])
        calls = (replace(pack, args=args), *case.calls[1:])
        yield replace(case, label=f"{case.label}, {label}", calls=calls), lambda target: target
    yield replace(case, label=f"{case.label}, wrapped again"), _Rewrapped


def _of_tensors(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.numel() else leaf


def _columns_of_a_wider_one(tensor: Tensor) -> Tensor:
    """Columns 1 … n of n + 3, the others being bytes 0xFF."""
    outer = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 3)
    outer.view(torch.uint8).fill_(255)
    view = outer[..., 1:-2]
    view.copy_(tensor)
    return view


def _column_major(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t() if tensor.ndim == 2 else tensor


_CLOTHES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "columns of a wider one": _columns_of_a_wider_one,
    "column-major": _column_major,
}


class _Rewrapped:
    """Around a kernel: components come as parameters, another weight is packed after each, and
    what was packed is handed on in new tensor objects."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def pack(self, weight: Any, facts: Any) -> Packed:
        """See Linear.pack."""
        other = rebuild(weight, _of_tensors(_rolled))
        packed = self._target.pack(rebuild(weight, _of_tensors(_parameter)), facts)
        self._target.pack(other, facts)
        made: Packed = replace(packed, tensors=_anew(packed.tensors))
        return made


def _parameter(tensor: Tensor) -> Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _rolled(tensor: Tensor) -> Tensor:
    """Other values of the same kind: rows moved on by one."""
    bytes_ = tensor.contiguous().unsqueeze(-1).view(torch.uint8)  # not all dtypes can be rolled
    return bytes_.roll(1, 0).view(tensor.dtype).squeeze(-1)


def _anew(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {k: _anew(v) for k, v in value.items()}
    return value
