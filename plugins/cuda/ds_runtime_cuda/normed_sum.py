"""Sums over ranks with the add and the norm after them, in one launch: csrc/normed_sum.cu."""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist
from torch import Tensor

from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.quant import GROUP, scale_columns
from ds_runtime_cuda.shared_memory import SharedMemory

_SOURCE = "normed_sum.cu"
_MOST_RANKS = 8
_BLOCKS = 128  # at most; of more rows a block has several
_SIGNALS = _MOST_RANKS * _BLOCKS * 8  # bytes in front of the parts
_ALIGNED = 16  # bytes that a thread moves at once
_EACH = 8  # values of them


class _NormedSumArgs(ctypes.Structure):
    """Args of csrc/normed_sum.cu."""

    _fields_ = (
        ("peers", ctypes.c_uint64 * _MOST_RANKS),
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "residual", "weight", "normed", "summed", "codes", "scale", "calls")
        ),
        ("half", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("pitch", "powers", "rank", "rows", "width", "wide")),
        ("eps", ctypes.c_float),
    )


def defines(ranks: int) -> dict[str, int]:
    return {
        "ARGS": ctypes.sizeof(_NormedSumArgs),
        "RANKS": ranks,
        "SIGNALS": _SIGNALS,
        "BLOCKS": _BLOCKS,
    }


class NormMemory(SharedMemory):
    """Signals of each rank's blocks, and two halves of at least `nbytes` bytes for its parts."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        nbytes: int,
        device: torch.device,
        rank: int,
        ranks: int,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.half = -(-nbytes // _ALIGNED) * _ALIGNED
        super().__init__(group, _SIGNALS + 2 * self.half, device)

    def allocate(self) -> None:
        """Compiles the kernel, too: a rank that cannot would keep the others waiting."""
        super().allocate()
        self.part(self.nbytes // 4, torch.int32).zero_()
        self.calls = torch.zeros(2, dtype=torch.int64, device=self._device)
        self.module = nvrtc.Module(_SOURCE, defines(self.ranks))
        for name in ("normed_sum", "normed_sum_wide"):
            self.module.function(name)
        self.calls.tolist()  # no rank may write a signal before there are zeros

    def meet(self) -> None:
        super().meet()
        self.addresses = self.peers(self.rank)


class NormedSum:
    """As `Communicator.normed_sum`. All calls of a group are on one stream."""

    def __init__(self, memory: NormMemory) -> None:
        self._memory = memory
        args = self._args = _NormedSumArgs(rank=memory.rank, half=memory.half)
        args.peers[: memory.ranks] = memory.addresses
        args.calls = memory.calls.data_ptr()

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed, args = torch.empty(x.shape, dtype=x.dtype, device=x.device), self._args
        args.normed, args.codes = normed.data_ptr(), None
        return normed, self._run(x, residual, weight, eps)

    def quantized(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, ue8m0: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, width = x.shape
        codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
        scale, args = scale_columns(rows, width // GROUP, x.device), self._args
        args.codes, args.scale, args.powers = codes.data_ptr(), scale.data_ptr(), ue8m0
        args.pitch = scale.stride(1)
        return codes, scale, self._run(x, residual, weight, eps)

    def _run(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The new residual; what else is written has been put into the arguments."""
        x, residual = _whole(x), _whole(residual)
        rows, width = x.shape
        assert 2 * x.numel() <= self._memory.half and width % _EACH == 0
        if not rows:
            return residual
        chunks = -(-width // _EACH)
        name = "normed_sum" if chunks <= 1024 else "normed_sum_wide"
        threads = -(-chunks // (32 if chunks <= 1024 else 64)) * 32
        args, weight = self._args, _whole(weight)
        args.x, args.residual, args.weight = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
        args.summed = residual.data_ptr()
        args.rows, args.width, args.wide = rows, width, weight.dtype == torch.float32
        args.eps = eps
        grid = (min(rows, _BLOCKS), 1)
        nvrtc.launch(self._memory.module.function(name), grid, threads, 0, args)
        return residual


def _whole(x: Tensor) -> Tensor:
    """The same, contiguous and aligned as the kernel reads it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED else x
