"""Kernels in which ranks wait for each other, and the memory in which they do: csrc/ranks.cuh."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.shared_memory import SharedMemory

MOST_RANKS = 8
BLOCKS = 128  # at most; where there is more work, a block has several parts of it
ALIGNED = 16  # bytes that a thread moves at once
EACH = 8  # values of them
_SIGNALS = MOST_RANKS * BLOCKS * 8  # bytes in front of the parts


def fields(*pointers: str) -> tuple[tuple[str, type], ...]:
    """The first of a kernel's arguments: addresses of the ranks' memory, then `pointers`, the
    counter of calls, and the bytes of a half."""
    named = ((name, ctypes.c_void_p) for name in (*pointers, "calls"))
    return (("peers", ctypes.c_uint64 * MOST_RANKS), *named, ("half", ctypes.c_int64))


def whole(x: Tensor) -> Tensor:
    """The same, contiguous and aligned as such kernels read it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNED else x


@dataclass(frozen=True, slots=True)
class RankKernels:
    """Of a file of csrc: its name, its kernels, and what each of them takes."""

    source: str
    names: tuple[str, ...]
    arguments: type[ctypes.Structure]

    def defines(self, ranks: int) -> dict[str, int]:
        """What the file is compiled with."""
        return {
            "ARGS": ctypes.sizeof(self.arguments),
            "RANKS": ranks,
            "SIGNALS": _SIGNALS,
            "BLOCKS": BLOCKS,
        }


class RankMemory(SharedMemory):
    """Signals of each rank's blocks, and two halves of at least `nbytes` bytes for its parts, for
    calls of `kernels`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        nbytes: int,
        device: torch.device,
        rank: int,
        ranks: int,
        kernels: RankKernels,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.half = -(-nbytes // ALIGNED) * ALIGNED
        self._kernels = kernels
        super().__init__(group, _SIGNALS + 2 * self.half, device)

    def allocate(self) -> None:
        """Compiles the kernels, too: a rank that cannot would keep the others waiting."""
        super().allocate()
        self.part(self.nbytes // 4, torch.int32).zero_()
        self._calls = torch.zeros(2, dtype=torch.int64, device=self._device)
        module = nvrtc.Module(self._kernels.source, self._kernels.defines(self.ranks))
        self.functions = {name: module.function(name) for name in self._kernels.names}
        self._calls.tolist()  # no rank may write a signal before there are zeros

    def meet(self) -> None:
        super().meet()
        self._addresses = self.peers(self.rank)

    def fill(self, arguments: ctypes.Structure) -> None:
        """What is the same in every call."""
        arguments.peers[: self.ranks] = self._addresses
        arguments.calls = self._calls.data_ptr()
        arguments.rank, arguments.half = self.rank, self.half
