"""Collectives that a recorded step can run again: each is one op, over when it returns.

Torch's own continue after the op that began them, and who waits for them is no op.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import TorchCommunicator
from ds_runtime_cpu import native

_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, HostCommunicator] = weakref.WeakValueDictionary()


@cache
def _op() -> tuple[Any, torch.library.Library]:
    """The op, and what it lasts as long as."""
    library: Any = torch.library.Library("ds_cpu", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("collective(Tensor x, str name, int group) -> Tensor")
    library.impl("collective", _run, "CPU")
    return torch.ops.ds_cpu.collective.default, library


def _run(x: Tensor, name: str, group: int) -> Tensor:
    own = x.clone() if name == "all_reduce" else x  # which is summed in place
    found: Tensor = getattr(super(HostCommunicator, _groups[group]), name)(own)
    return found


class HostCommunicator(TorchCommunicator):
    """Gloo's, in steps that are recorded, too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._numbered()

    def _numbered(self) -> None:
        self._number = next(_numbers)
        _groups[self._number] = self

    def split(self, groups: Sequence[Sequence[int]]) -> HostCommunicator:
        own = super().split(groups)
        assert isinstance(own, HostCommunicator)
        own._numbered()
        return own

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._recorded("all_reduce", x) if native.records() else super().all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._recorded("all_gather", x) if native.records() else super().all_gather(x)

    def gather_rows(self, x: Tensor) -> Tensor:
        return self._recorded("gather_rows", x) if native.records() else super().gather_rows(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._recorded("all_to_all", x) if native.records() else super().all_to_all(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if native.records():
            return self._recorded("reduce_scatter", x)
        return super().reduce_scatter(x)

    def _recorded(self, name: str, x: Tensor) -> Tensor:
        op, _ = _op()
        found: Tensor = op(x, name, self._number)
        return found
