"""AITER: block-scaled FP8 and microscaled FP4 matmuls, activations rounded on the way.

Source of the calls: github.com/ROCm/aiter, aiter/ops/gemm_op_a8w8.py, gemm_op_a4w4.py, quant.py.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import Facts, Packed, Weight, fp8_blocks
from ds_runtime_rocm import blocks

_ROWS = 32  # activations of the FP4 matmul come in whole tiles of so many rows
_SCALE_ROWS, _SCALE_COLUMNS = 256, 8  # tiles of shuffled exponents


@cache
def _library(module: str = "aiter") -> Any:
    return import_module(module)


def fp8_dtype(arch: str) -> torch.dtype:
    """What the architecture multiplies."""
    return blocks.FNUZ if arch == "gfx942" else blocks.E4M3


class LinearFp8:
    """y = x · Wᵀ in FP8 with 1×128 by 128×128 scales."""

    tag = "rocm.aiter_linear_fp8"
    shuffled = False

    def __init__(self, facts: Facts) -> None:
        name = "gemm_a8w8_blockscale" + "_bpreshuffle" * self.shuffled
        self._gemm = getattr(_library(), name)
        self._quantise = _library().per_group_quant_hip
        self._fp8 = fp8_dtype(facts.device.arch)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        joined = blocks.join(weight, self._fp8)
        if joined is None:
            return fp8_blocks.dense(weight, self.tag)
        values, scale = joined
        if self.shuffled:
            values = _library("aiter.ops.shuffle").shuffle_weight(values, (16, 16))
        tensors = {"weight": values, "scale": scale}
        nbytes = values.nbytes + scale.nbytes
        return Packed(self.tag, weight.shape, tensors, nbytes, self._restore)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        held = packed.tensors
        if "dense" in held:
            return F.linear(x, held["dense"])
        if not x.shape[0]:  # the library fails on no rows
            return x.new_empty(0, packed.shape[0])
        q, scale = self._quantise(
            x.contiguous(), quant_dtype=self._fp8, transpose_scale=self.shuffled
        )
        out: Tensor = self._gemm(q, held["weight"], scale, held["scale"], dtype=x.dtype)
        return out

    def _restore(self, packed: Packed) -> Tensor:
        values = packed.tensors["weight"]
        plain = blocks.unshuffle(values) if self.shuffled else values
        return fp8_blocks.spread(plain, packed.tensors["scale"])


class LinearFp8Shuffled(LinearFp8):
    """The same over weights shuffled for the matrix units, and scales with the tokens inside."""

    tag = "rocm.aiter_linear_fp8_shuffled"
    shuffled = True


class LinearMxfp4:
    """y = x · Wᵀ with both in microscaled FP4, on gfx950."""

    tag = "rocm.aiter_linear_mxfp4"

    def __init__(self, facts: Facts) -> None:
        pass

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        joined = blocks.join_mxfp4(weight)
        if joined is None:
            return fp8_blocks.dense(weight, self.tag)
        values, exponents = joined
        values = _library("aiter.ops.shuffle").shuffle_weight(values, (16, 16))
        scale = _library("aiter.utility.fp4_utils").e8m0_shuffle(exponents)
        nbytes = values.nbytes + scale.nbytes
        tensors = {"weight": values, "scale": scale}
        return Packed(self.tag, weight.shape, tensors, nbytes, _restore_mxfp4)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        held, aiter = packed.tensors, _library()
        if "dense" in held:
            return F.linear(x, held["dense"])
        if not x.shape[0]:
            return x.new_empty(0, packed.shape[0])
        q, scale = aiter.per_1x32_f4_quant_hip(x.contiguous(), shuffle=True)
        out: Tensor = aiter.gemm_a4w4(
            q, held["weight"].view(q.dtype), scale, held["scale"].view(scale.dtype), dtype=x.dtype
        )
        return out[: x.shape[0]]


def _restore_mxfp4(packed: Packed) -> Tensor:
    rows, cols = packed.shape
    exponents = unshuffle_scale(packed.tensors["scale"])[:rows, : cols // blocks.GROUP]
    return blocks.spread_mxfp4(blocks.unshuffle(packed.tensors["weight"]), exponents)


def unshuffle_scale(shuffled: Tensor) -> Tensor:
    """The inverse of AITER's e8m0_shuffle, whole tiles."""
    rows, cols = shuffled.shape
    tiles = shuffled.view(rows // 32, cols // 8, 4, 16, 2, 2)
    return tiles.permute(0, 5, 3, 1, 4, 2).reshape(rows, cols)
