"""Sums over ranks with the add and the norm after them, in one launch: csrc/normed_sum.cu."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.quant import GROUP, scale_columns
from ds_runtime_cuda.rank_kernels import BLOCKS, EACH, RankKernels, RankMemory, fields, whole


class _NormedSumArgs(ctypes.Structure):
    """Args of csrc/normed_sum.cu."""

    _fields_ = (
        *fields("x", "residual", "weight", "normed", "summed", "codes", "scale"),
        *((name, ctypes.c_int32) for name in ("pitch", "powers", "rank", "rows", "width", "wide")),
        ("eps", ctypes.c_float),
    )


KERNELS = RankKernels("normed_sum.cu", ("normed_sum", "normed_sum_wide"), _NormedSumArgs)


class NormedSum:
    """As `Communicator.normed_sum`. All calls of a group are on one stream."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory, self._args = memory, _NormedSumArgs()
        memory.fill(self._args)

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
        x, residual = whole(x), whole(residual)
        rows, width = x.shape
        assert 2 * x.numel() <= self._memory.half and width % EACH == 0
        if not rows:
            return residual
        chunks = -(-width // EACH)
        name = KERNELS.names[chunks > 1024]
        threads = -(-chunks // (32 if chunks <= 1024 else 64)) * 32
        args, weight = self._args, whole(weight)
        args.x, args.residual, args.weight = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
        args.summed = residual.data_ptr()
        args.rows, args.width, args.wide = rows, width, weight.dtype == torch.float32
        args.eps = eps
        grid = (min(rows, BLOCKS), 1)
        nvrtc.launch(self._memory.functions[name], grid, threads, 0, args)
        return residual
