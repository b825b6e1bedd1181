"""Sums in the order of the ranks, in one kernel: torch's symmetric memory over NVLink.

Every rank copies its part into a buffer that the others can read. torch's one-shot kernel then
waits for all ranks, reads the parts, and adds them from rank 0 on (`load_and_reduce` in torch's
CUDASymmetricMemoryOps.cu). The buffer is float32, so that sums have the bits of parts that were
gathered and added. Multicast stays off: whether it may be used depends on the machine.

torch numbers the meetings of a process, and ranks meet under that number. A process that has had an
engine before is ahead of new ones, and would wait for ever: its next engine gathers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_runtime.api import TorchCommunicator

log = logging.getLogger(__name__)

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class _Meetings:
    """Of this process; None: one has failed, and torch may be at any number."""

    count: int | None = 0


class OrderedSum:
    """A buffer of `values` float32 values of each rank of a group. Every rank makes one."""

    def __init__(self, group: dist.ProcessGroup, values: int, device: torch.device) -> None:
        self._name, self.values, self._device = group.group_name, values, device

    def allocate(self) -> None:
        """Raises whatever torch raises where the device shares no memory."""
        import torch.distributed._symmetric_memory as symmetric

        os.environ[_NO_MULTICAST] = "1"  # read when ranks meet
        self._buffer: Tensor = symmetric.empty(
            self.values, dtype=torch.float32, device=self._device
        )

    def meet(self) -> None:
        """Let the other ranks read the buffer, as they let this one. Every rank calls it."""
        import torch.distributed._symmetric_memory as symmetric

        before, _Meetings.count = _Meetings.count, None
        symmetric.rendezvous(self._buffer, self._name)
        _Meetings.count = None if before is None else before + 1

    def __call__(self, x: Tensor) -> Tensor:
        """Any shape of at most `values` values, float16, bfloat16 or float32 → float32, flat."""
        part = self._buffer[: x.numel()]
        part.copy_(x.reshape(-1))
        found: Tensor = _one_shot()(part, "sum", self._name)
        return found


def _one_shot() -> Any:
    return torch.ops.symm_mem.one_shot_all_reduce


class NvlinkCommunicator(TorchCommunicator):
    """NCCL's. sizes: called for those of groups that share memory."""

    def __init__(self, *args: Any, sizes: Callable[[], Sequence[int]], **more: Any) -> None:
        super().__init__(*args, **more)
        self._sizes = sizes

    def ordered_sum(self, values: int) -> Callable[[Tensor], Tensor] | None:
        """None where a rank could not share its memory; rank 0 says why."""
        if not all(self.gather_objects(self.size in self._sizes())):
            return None
        assert self._device is not None
        made = OrderedSum(self._group, values, self._device)
        check = partial(_check, made, self)
        for step in (partial(_check_meetings, self), made.allocate, made.meet, check):
            if why := next(filter(None, self.gather_objects(_tried(step))), ""):
                if self.rank == 0:
                    log.warning("sums in the order of the ranks gather their parts: %s", why)
                return None
        return made


def _tried(step: Callable[[], Any]) -> str:
    """What was wrong, or ""."""
    try:
        step()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def _check_meetings(comm: TorchCommunicator) -> None:
    counts = comm.gather_objects(_Meetings.count)
    if None in counts or len(set(counts)) > 1:
        raise RuntimeError(
            f"ranks have set up shared memory a different number of times ({counts}); "
            "torch needs the same"
        )


def _check(made: OrderedSum, comm: TorchCommunicator) -> None:
    """Sums whose bits tell the order: 1 is lost beside 2 ** 24, if it is added first."""
    assert comm._device is not None
    parts = [(1.0, 2.0**24, -(2.0**24), 3.0)[rank % 4] for rank in range(comm.size)]
    want = torch.zeros((), dtype=torch.float32)
    for part in parts:
        want += part
    x = torch.full((min(257, made.values),), parts[comm.rank], device=comm._device)
    found = made(x).cpu()
    if not bool((found == want).all()):
        raise RuntimeError(f"a sum of {parts} is {found[0].item()} instead of {want.item()}")
