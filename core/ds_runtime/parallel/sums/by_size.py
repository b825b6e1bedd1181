"""Sums by the kind that was measured to be the fastest for the size of the message."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_runtime.parallel.sums.kinds import ONE_SHOT, SumSizes
from ds_runtime.parallel.sums.normed import Summable, Unsummed, takes
from ds_runtime.parallel.sums.overlapped import Started, is_overlapping
from ds_runtime.parallel.through import Through
from ds_runtime.platform.contract import Communicator, NormedSum

_DTYPES = frozenset({torch.float32, torch.bfloat16})


class BySize(Through):
    """A communicator whose `all_reduce` is one of `group`'s fast sums where `sizes` say so. Every
    rank makes one at the same time, with the same sizes. `sizes`: those of kinds that all have.
    normed: whether sums shall be one kernel with the norm after them, where the group has one."""

    def __init__(self, group: Communicator, sizes: SumSizes, normed: bool = True) -> None:
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
        self._normed: NormedSum | None = None
        # A communicator that was written before `normed_sum` was in the contract has none.
        most = dict(self.sizes.upto).get(ONE_SHOT) if normed else None
        if most and hasattr(group, "normed_sum"):
            self._normed = group.normed_sum(most)
        if sizes.most > 0 and normed and not all(group.gather_objects(self._normed is not None)):
            self._normed = None

    @property
    def norms(self) -> bool:
        """Whether one kernel sums few rows with the add and the norm after them."""
        return self._normed is not None

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype in _DTYPES and (sum_up := self._sum_of(x)) is not None:
            return sum_up(x.contiguous())
        return self._group.all_reduce(x)

    def later(self, x: Tensor) -> Summable:
        """The sum of x, whose consumer is an add with an RMSNorm after it: not made yet where one
        kernel does all of it."""
        if self._normed is None or not takes(x) or self._kind(x) != ONE_SHOT:
            return self.all_reduce(x)
        return Unsummed(x.contiguous(), self.all_reduce, self._normed)

    def _kind(self, x: Tensor) -> str:
        return self.sizes.kind(x.numel() * x.element_size())

    def _sum_of(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        return self._fast.get(self._kind(x))


def later(group: Communicator, x: Tensor) -> Summable:
    """As `BySize.later`, of any group. Within `overlapping` the library's kind is started."""
    if is_overlapping():
        return Started(group.all_reduce_async(x), x.shape)
    return group.later(x) if isinstance(group, BySize) else group.all_reduce(x)
