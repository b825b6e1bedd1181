"""Sums that add the ranks in their order, so that a row's bits hang on nothing else.

What a library sums by itself it divides by the size of the message, and other sizes are added in
another order. Here every rank gathers the parts, which is exact, and adds them itself. Of many
values each rank adds a share and gathers the sums: the same bits in fewer bytes and more exchanges.
Few values go through one kernel of the communicator where it has one, with the same bits again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_runtime.parallel.sums.sizes import MANY
from ds_runtime.parallel.through import Through
from ds_runtime.platform.contract import Communicator


class InOrder(Through):
    """A communicator of several ranks whose `all_reduce` and `reduce_scatter` are such sums, in
    float32 at least; all else is that of `group`.
    """

    def __init__(self, group: Communicator, here: bool = True) -> None:
        """here: all ranks are on one host. Every rank makes one at the same time."""
        super().__init__(group)
        self._here = here
        # A communicator that was written before `ordered_sum` was in the contract gathers.
        self._at_once = group.ordered_sum(MANY) if here and hasattr(group, "ordered_sum") else None

    def all_reduce(self, x: Tensor) -> Tensor:
        flat, count = x.reshape(-1), x.numel()
        if count < MANY:
            return self._few(flat).view(x.shape)
        if odd := -count % self.size:
            flat = torch.nn.functional.pad(flat, (0, odd))
        part = self._sum(self._shares(flat))
        return self._group.gather_rows(part)[:count].view(x.shape)

    def all_reduce_async(self, x: Tensor) -> Callable[[], Tensor]:
        total = self.all_reduce(x)
        return lambda: total

    @property
    def adds_at_once(self) -> bool:
        """Whether one kernel adds few values: all ranks of the group could set it up."""
        return self._at_once is not None

    def _few(self, x: Tensor) -> Tensor:
        """The sum of fewer than `MANY` values [n]."""
        if self._at_once is not None and x.numel() and x.element_size() <= 4:
            return self._at_once(x).to(x.dtype)
        return self._sum(self._group.gather_rows(x.view(1, -1)))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._sum(self._shares(x.contiguous())).view(-1, *x.shape[1:])

    def _shares(self, x: Tensor) -> Tensor:
        """[size * n, ...] per rank → [size, values]: what each has for this rank. A communicator
        that was written before `all_to_all` was in the contract gathers everything."""
        if hasattr(self._group, "all_to_all"):
            return self._group.all_to_all(x).view(self.size, -1)
        every = self._group.gather_rows(x.view(1, -1))
        return every.view(self.size, self.size, -1)[:, self.rank]

    def _sum(self, parts: Tensor) -> Tensor:
        """[size, n] → [n]."""
        total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
        for part in parts[1:]:
            total += part
        return total.to(parts.dtype)

    def ordered_sum(self, values: int) -> Callable[[Tensor], Tensor] | None:
        return self._at_once

    def split(self, groups: Sequence[Sequence[int]]) -> InOrder:
        return InOrder(self._group.split(groups), self._here)
