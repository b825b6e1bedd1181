"""Memory that the ranks of a group read of each other over NVLink, and torch's sums in it.

torch's kernels wait for all ranks, read their parts, and add them from rank 0 on (`load_and_reduce`
in torch's CUDASymmetricMemoryOps.cu), so all ranks have the same bits. Multicast stays off: whether
it may be used depends on the machine. All sums of a group belong on one stream, as they share
signals.

torch numbers the meetings of a process, and ranks meet under that number. A process that has had an
engine before is ahead of new ones, and would wait for ever: its next engine shares no memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_runtime.api import TorchCommunicator

log = logging.getLogger(__name__)

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_WORD = 4  # bytes, in which memory is asked for
_ALIGNED = 16  # bytes: what torch's kernels move at once


class _Meetings:
    """Of this process; None: one has failed, and torch may be at any number."""

    count: int | None = 0


class SharedMemory:
    """At least `nbytes` bytes of each rank of a group. Every rank makes one."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        self.name, self.nbytes, self._device = group.group_name, nbytes, device

    def allocate(self) -> None:
        """Raises whatever torch raises where the device shares no memory."""
        import torch.distributed._symmetric_memory as symmetric

        os.environ[_NO_MULTICAST] = "1"  # read when ranks meet
        words = -(-self.nbytes // _WORD)
        self._words: Tensor = symmetric.empty(words, dtype=torch.float32, device=self._device)

    def meet(self) -> None:
        """Let the other ranks read it, as they let this one. Every rank calls it."""
        import torch.distributed._symmetric_memory as symmetric

        before, _Meetings.count = _Meetings.count, None
        self._met = symmetric.rendezvous(self._words, self.name)
        _Meetings.count = None if before is None else before + 1

    def peers(self, rank: int) -> list[int]:
        """Address of each rank's as this one, `rank`, reads it. Raises RuntimeError where torch has
        put this rank's own elsewhere in what ranks share."""
        found = list[int](self._met.buffer_ptrs)
        if found[rank] != self._words.data_ptr():
            raise RuntimeError("memory to share does not lie at the beginning of what is shared")
        return found

    def part(self, count: int, dtype: torch.dtype) -> Tensor:
        """Its first `count` values."""
        return self._words.view(dtype)[:count]


class OrderedSum:
    """Any shape of at most as many values as fit, in float32 → float32, flat."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def __call__(self, x: Tensor) -> Tensor:
        """x: float16, bfloat16 or float32."""
        part = self._memory.part(x.numel(), torch.float32)
        part.copy_(x.reshape(-1))
        found: Tensor = _ops().one_shot_all_reduce(part, "sum", self._memory.name)
        return found


class OneShot:
    """Float32 or bfloat16, whose additions are rounded to it → the same shape."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def __call__(self, x: Tensor) -> Tensor:
        """x: contiguous, whole 16 bytes. The kernel itself copies it to where others read it."""
        if x.storage_offset() * x.element_size() % _ALIGNED:
            x = x.clone()  # torch wants it aligned as the memory is
        part = self._memory.part(x.numel(), x.dtype)
        found: Tensor = _ops().one_shot_all_reduce_copy(part, x.view(-1), "sum", self._memory.name)
        return found.view(x.shape)


class TwoShot:
    """Float32 or bfloat16, whose additions are rounded to it → the same shape."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def __call__(self, x: Tensor) -> Tensor:
        """x: contiguous, whole 16 bytes."""
        part = self._memory.part(x.numel(), x.dtype)
        part.copy_(x.view(-1))
        found = torch.empty_like(x)
        _ops().two_shot_all_reduce_out(part, "sum", self._memory.name, found.view(-1))
        return found


def _ops() -> Any:
    return torch.ops.symm_mem


def shared(
    comm: TorchCommunicator,
    made: SharedMemory,
    check: Callable[[SharedMemory], None],
    instead: str,
) -> bool:
    """Whether every rank shares its memory and passes `check`. Else rank 0 says why, and what
    serves `instead`."""
    steps = (partial(_check_meetings, comm), made.allocate, made.meet, partial(check, made))
    for step in steps:
        if why := next(filter(None, comm.gather_objects(_tried(step))), ""):
            if comm.rank == 0:
                log.warning("%s: %s", instead, why)
            return False
    return True


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
