"""A communicator in front of another one, which does all that it does not do itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_runtime.platform.contract import Communicator, NormedSum


class Through:
    """Every collective is that of `group`."""

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x)

    def all_reduce_async(self, x: Tensor) -> Callable[[], Tensor]:
        return self._group.all_reduce_async(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._group.all_gather(x)

    def gather_rows(self, x: Tensor) -> Tensor:
        return self._group.gather_rows(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._group.reduce_scatter(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._group.all_to_all(x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._group.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        self._group.send(x, to)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        return self._group.receive(shape, dtype, source)

    def barrier(self) -> None:
        self._group.barrier()

    def gather_objects(self, value: Any) -> list[Any]:
        return self._group.gather_objects(value)

    def ordered_sum(self, values: int) -> Callable[[Tensor], Tensor] | None:
        return self._group.ordered_sum(values)

    def fast_sums(self, nbytes: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
        return self._group.fast_sums(nbytes)

    def normed_sum(self, nbytes: int) -> NormedSum | None:
        return self._group.normed_sum(nbytes)

    def gather_logits(self, nbytes: int) -> Callable[[Tensor, Tensor], None] | None:
        return self._group.gather_logits(nbytes)

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        return self._group.split(groups)

    def close(self) -> None:
        self._group.close()
