"""Logits of all ranks side by side in one launch: csrc/gather_logits.cu."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.rank_kernels import (
    ALIGNED,
    BLOCKS,
    EACH,
    RankKernels,
    RankMemory,
    fields,
    whole,
)

_FEW, _MANY = 256, 1024  # threads of a block; few while that spreads the work over more blocks


class _GatherLogitsArgs(ctypes.Structure):
    """Args of csrc/gather_logits.cu."""

    _fields_ = (
        *fields("x", "out"),
        ("pitch", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rank", "rows", "each", "width")),
    )


KERNELS = RankKernels("gather_logits.cu", ("gather_logits",), _GatherLogitsArgs)


class GatherLogits:
    """As `Communicator.gather_logits`. All calls of a group are on one stream."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory, self._args = memory, _GatherLogitsArgs()
        memory.fill(self._args)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        (rows, each), args = x.shape, self._args
        assert 2 * x.numel() <= self._memory.half and each % EACH == 0
        assert out.shape[0] == rows and out.shape[1] <= self._memory.ranks * each
        if not x.numel():
            return
        x = whole(x)
        aligned = out.stride(1) == 1 and out.stride(0) % 4 == 0 and out.data_ptr() % ALIGNED == 0
        to = out if aligned else torch.empty(rows, -(-out.shape[1] // 4) * 4, device=x.device)
        args.x, args.out, args.pitch = x.data_ptr(), to.data_ptr(), to.stride(0)
        args.rows, args.each, args.width = rows, each, out.shape[1]
        chunks = x.numel() // EACH
        threads = _FEW if chunks <= _FEW * BLOCKS else _MANY
        grid = (min(-(-chunks // threads), BLOCKS), 1)
        nvrtc.launch(self._memory.functions["gather_logits"], grid, threads, 0, args)
        if not aligned:
            out.copy_(to[:, : out.shape[1]])
