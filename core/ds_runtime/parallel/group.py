"""Communicators over torch.distributed, for platforms to hand out.

A platform's `communicator()` returns a `TorchCommunicator` with the backend name that its devices
need; one rank alone gets a `SoloCommunicator` from the engine. Nothing here knows a vendor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_runtime.errors import ConfigError, EngineDeadError
from ds_runtime.parallel.skew import absent
from ds_runtime.platform.contract import NormedSum


class SoloCommunicator:
    """The group of one rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_async(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def gather_rows(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise ValueError(f"rank {to}: this group has one rank, which has nobody to send to")

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        raise ValueError(f"rank {source}: this group has one rank, and nobody sends to it")

    def barrier(self) -> None:
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def ordered_sum(self, values: int) -> None:
        return None

    def fast_sums(self, nbytes: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
        return {}

    def normed_sum(self, nbytes: int) -> None:
        return None

    def gather_logits(self, nbytes: int) -> None:
        return None

    def split(self, groups: Sequence[Sequence[int]]) -> SoloCommunicator:
        return self

    def close(self) -> None:
        return None


@dataclass(slots=True)
class HostWait:
    """Seconds for which the host was in collectives."""

    seconds: float = 0.0


_Collective = Callable[[Any, Tensor], Tensor]
_Found = TypeVar("_Found")


def _counted(collective: _Collective) -> _Collective:
    @wraps(collective)
    def call(self: Any, x: Tensor) -> Tensor:
        return _timed(self, lambda: collective(self, x))

    return call


def _timed(group: Any, run: Callable[[], _Found], since: float | None = None) -> _Found:
    """As `_in_time`, and add its seconds to those that the group has waited."""
    begin = perf_counter()
    found = _in_time(group, run, since)
    waited = getattr(group, "waited", None)  # a plugin's class may enter a group in its own way
    if waited is not None:
        waited.seconds += perf_counter() - begin
    return found


def _in_time(group: Any, run: Callable[[], _Found], since: float | None = None) -> _Found:
    """Run what waits for other ranks. since: of `perf_counter`, when the wait began; None: now.
    Raises EngineDeadError with the ranks that did not come, where that is why it fails."""
    begin = perf_counter() if since is None else since
    try:
        return run()
    except RuntimeError as e:  # which says that a time is over, and not whose fault it is
        timeout = getattr(group, "_timeout", None)
        if timeout is None or perf_counter() - begin < 0.9 * timeout.total_seconds():
            raise
        rank, board = dist.get_rank(), dist.distributed_c10d._get_default_store()
        every = getattr(group, "_ranks", None) or range(dist.get_world_size())
        if not (late := absent(board, rank, every)):
            raise
        names = " and ".join(f"engine rank {other}" for other in late)
        names = f"at least one of {names}" if len(late) > 1 else names
        raise EngineDeadError(
            f"{names} did not come within {timeout.total_seconds():.0f} s (--dist-timeout) to what "
            f"engine rank {rank} waits for: it hangs, or needs more time"
        ) from e


class TorchCommunicator:
    """A Communicator over a torch.distributed process group. The process has one such group of all
    ranks, and any number that are split from it.

    * backend: a torch.distributed backend that moves tensors, and objects too if it can.
    * rank, size: as Communicator's.
    * init_method: such as "tcp://127.0.0.1:29500", "file:///tmp/x" or "env://".
    * timeout: seconds that a rank waits for the others.
    * reduce_dtype: the dtype in which 16-bit sums are computed. None: the backend's own.
    * device: this rank's own. The group is then connected at once, instead of in its first
      collective.

    `waited` counts what the host spent in the collectives of all groups. It leaves out those of a
    captured step that the device runs by itself. A collective that a rank does not come to within
    the timeout raises EngineDeadError with its number, if the backend raises RuntimeError then.
    Raises ConfigError if torch has no torch.distributed, or this process is in a group already.
    """

    def __init__(
        self,
        backend: str,
        rank: int,
        size: int,
        init_method: str,
        timeout: float = 600.0,
        reduce_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not dist.is_available():
            raise ConfigError(f"--tp {size}: this build of torch has no torch.distributed")
        if dist.is_initialized():
            raise ConfigError(
                f"--tp {size}: this process is in a group of ranks already; close the other engine "
                "first, or start this one in a process of its own"
            )
        self._reduce_dtype, self._device, self.waited = reduce_dtype, device, HostWait()
        self._timeout = timedelta(seconds=timeout)
        dist.init_process_group(
            backend=backend,
            init_method=init_method,
            rank=rank,
            world_size=size,
            timeout=self._timeout,
            device_id=device,
        )
        self._enter(dist.group.WORLD, range(size))
        # torch 2.13 has new names for both.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def _enter(self, group: Any, ranks: Sequence[int]) -> None:
        """ranks: those of the group, as all ranks are numbered."""
        self._group, self._ranks = group, tuple(ranks)
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)

    def split(self, groups: Sequence[Sequence[int]]) -> TorchCommunicator:
        own = copy(self)
        for group in groups:
            ranks = [self._ranks[rank] for rank in group]
            made = dist.new_group(ranks, timeout=self._timeout)
            if dist.get_rank() in ranks:
                own._enter(made, ranks)
        return own

    def _summable(self, x: Tensor) -> Tensor:
        """In the dtype of sums, contiguous; `x` itself where that is so."""
        if self._reduce_dtype is not None and x.element_size() < self._reduce_dtype.itemsize:
            return x.to(self._reduce_dtype)
        return x.contiguous()

    @_counted
    def all_reduce(self, x: Tensor) -> Tensor:
        y = self._summable(x)
        dist.all_reduce(y, group=self._group)
        return y.to(x.dtype)

    def all_reduce_async(self, x: Tensor) -> Callable[[], Tensor]:
        """The backend's own sum. A subclass that sums in another way overrides this, too."""
        dtype, y, begin = x.dtype, self._summable(x), perf_counter()
        work = _timed(self, lambda: dist.all_reduce(y, group=self._group, async_op=True))

        def summed() -> Tensor:
            # A device's queue waits; where the host computes, the host does.
            _timed(self, work.wait, begin)
            return y.to(dtype)

        return summed

    @_counted
    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)  # [..., size * n]

    @_counted
    def gather_rows(self, x: Tensor) -> Tensor:
        rows = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._gather(rows, x.contiguous(), group=self._group)
        return rows

    @_counted
    def reduce_scatter(self, x: Tensor) -> Tensor:
        y = self._summable(x)
        part = y.new_empty(y.shape[0] // self.size, *y.shape[1:])
        self._scatter(part, y, group=self._group)
        return part.to(x.dtype)

    @_counted
    def all_to_all(self, x: Tensor) -> Tensor:
        rows = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.all_to_all_single(rows, x.contiguous(), group=self._group)
        return rows

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        y = x.contiguous()
        _in_time(self, lambda: dist.broadcast(y, self._ranks[source], group=self._group))
        return y

    def send(self, x: Tensor, to: int) -> None:
        y = x.contiguous()
        _in_time(self, lambda: dist.send(y, self._ranks[to], group=self._group))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        x = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        _in_time(self, lambda: dist.recv(x, self._ranks[source], group=self._group))
        return x

    def barrier(self) -> None:
        index = None if self._device is None else self._device.index
        own = None if index is None else [index]
        _in_time(self, lambda: dist.barrier(self._group, device_ids=own))

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        _in_time(self, lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def ordered_sum(self, values: int) -> Callable[[Tensor], Tensor] | None:
        return None  # torch has none for every device

    def fast_sums(self, nbytes: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
        return {}

    def normed_sum(self, nbytes: int) -> NormedSum | None:
        return None

    def gather_logits(self, nbytes: int) -> Callable[[Tensor, Tensor], None] | None:
        return None

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)  # of all ranks: every group
