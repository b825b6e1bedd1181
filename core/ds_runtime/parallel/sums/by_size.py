"""Sums by the kind that was measured to be the fastest for the size of the message."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_runtime.parallel.sums.kinds import SumSizes
from ds_runtime.parallel.through import Through
from ds_runtime.platform.contract import Communicator

_DTYPES = frozenset({torch.float32, torch.bfloat16})


class BySize(Through):
    """A communicator whose `all_reduce` is one of `group`'s fast sums where `sizes` say so. Every
    rank makes one at the same time, with the same sizes. `sizes`: those of kinds that all have."""

    def __init__(self, group: Communicator, sizes: SumSizes) -> None:
        super().__init__(group)
        self._fast = dict[str, Callable[[Tensor], Tensor]]()
        common = set[str]()
        if sizes.most > 0:
            # A communicator that was written before `fast_sums` was in the contract has none.
            if hasattr(group, "fast_sums"):
                self._fast.update(group.fast_sums(sizes.most))
            # A kind that one rank lacks would keep the others waiting.
            common = set(self._fast).intersection(*group.gather_objects([*self._fast]))
        self.sizes = SumSizes(tuple(one for one in sizes.upto if one[0] in common))

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype in _DTYPES and (sum_up := self._sum_of(x)) is not None:
            return sum_up(x.contiguous())
        return self._group.all_reduce(x)

    def _sum_of(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        return self._fast.get(self.sizes.kind(x.numel() * x.element_size()))
