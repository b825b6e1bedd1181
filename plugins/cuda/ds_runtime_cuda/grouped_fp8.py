"""Routed experts for thousands of tokens in FP8 on compute capability 9.0: csrc/grouped.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ds_runtime.api import Facts, Packed
from ds_runtime_cuda import grouped, nvrtc
from ds_runtime_cuda.expert_weights import SortedExperts
from ds_runtime_cuda.quant import GROUP, scale_columns

_SOURCE = "grouped.cu"
_THREADS, _ON_CHIP = 384, 232_448
_BOXES = (64, 128)  # rows that are fetched together: of tokens, of weights
_ALIGN = 4  # an expert's rows begin at multiples of it, so that their scales do at 16 bytes


class _GroupedArgs(ctypes.Structure):
    """Args of csrc/grouped.cu."""

    _fields_ = (
        ("maps", ctypes.c_uint64 * 32),
        *(
            (name, ctypes.c_void_p)
            for name in ("x_scale", "w_scale", "ends", "out", "out_scale", "next")
        ),
        ("pitch", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("experts", "columns", "k", "powers")),
        ("_end", ctypes.c_char * 56),  # the struct is a multiple of 64 bytes
    )


def _defines() -> dict[str, int]:
    return {"BYTES": _ON_CHIP, "ARGS": ctypes.sizeof(_GroupedArgs)}


@cache
def _module(device: torch.device) -> nvrtc.Module:
    """Of the current device, which `device` is."""
    return nvrtc.module(_SOURCE, _defines(), "experts=triton")


def compile_experts(facts: Facts, rows: Sequence[int]) -> None:
    """`Compiles.ahead`."""
    nvrtc.compile_for_device(_SOURCE, _defines())


def _arguments(x: Tensor, x_scale: Tensor, weight: Tensor, w_scale: Tensor) -> _GroupedArgs:
    """x: e4m3 [rows, k]; weight: e4m3 [experts, columns, k]; scales as quant.scale_columns lays
    them, [rows, k / 128], and [experts, columns / 128, k / 128]."""
    experts, columns, k = weight.shape
    args = _GroupedArgs()
    args.maps[:] = (
        *nvrtc.box_map(x.data_ptr(), x.dtype, x.shape[0], k, _BOXES[0]),
        *nvrtc.box_map(weight.data_ptr(), weight.dtype, experts * columns, k, _BOXES[1]),
    )
    args.x_scale, args.w_scale = x_scale.data_ptr(), w_scale.data_ptr()
    args.pitch, args.experts, args.columns, args.k = x_scale.stride(1), experts, columns, k
    return args


class ExpertsGrouped(SortedExperts):
    """Two grouped matmuls over rows sorted by expert; the first one activates and quantises."""

    def __init__(self, facts: Facts) -> None:
        pass

    def _summed(
        self, arrange: grouped.Arrange, weights: Tensor, ids: Tensor, packed: Packed
    ) -> Tensor:
        held, (experts, hidden, inter) = packed.tensors, packed.shape
        powers, device = bool(held.get("ue8m0", False)), ids.device
        if not ids.numel():
            return torch.zeros(ids.shape[0], hidden, dtype=torch.bfloat16, device=device)
        rows = grouped.sort_rows(ids, experts, _ALIGN)
        count = rows.owner.shape[0]
        counters = torch.zeros(2, dtype=torch.int32, device=device)
        h = torch.empty(count, inter, dtype=torch.float8_e4m3fn, device=device)
        h_scale = scale_columns(count, inter // GROUP, device)
        out = torch.empty(count, hidden, dtype=torch.bfloat16, device=device)
        arranged = arrange(rows)

        first = _arguments(*arranged, held["gate_up"], held["gate_up_scale"])
        first.out, first.out_scale, first.powers = h.data_ptr(), h_scale.data_ptr(), powers
        then = _arguments(h, h_scale, held["down"], held["down_scale"])
        then.out = out.data_ptr()
        module, grid = _module(device), (nvrtc.cores(device), 1)
        for name, args, counter in zip(("gate_up", "down"), (first, then), counters, strict=True):
            args.ends, args.next = rows.ends.data_ptr(), counter.data_ptr()
            nvrtc.launch(module.function(name, _ON_CHIP), grid, _THREADS, _ON_CHIP, args)
        return grouped.combine(out, weights, rows)
