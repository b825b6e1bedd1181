"""Matmuls: in the compute dtype, and int8 by int8 with activations rounded per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import Facts, Packed, ReferenceLinear, Weight, torch_dtype
from ds_runtime_npu import int8
from ds_runtime_npu.library import NZ, npu


class LinearDense(ReferenceLinear):
    """y = x · Wᵀ in the compute dtype, through torch."""

    tag = "npu.linear"


class LinearInt8:
    """npu_quant_matmul over weights in fractal format."""

    tag = "npu.linear_int8"

    def __init__(self, facts: Facts) -> None:
        self._dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        codes, scale = int8.rows(weight)
        held = npu().npu_format_cast(codes.t().contiguous(), NZ)  # [in, out]
        tensors = {"weight": held, "scale": scale}
        nbytes = held.nbytes + scale.nbytes
        return Packed(self.tag, weight.shape, tensors, nbytes, restore=_restore)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not x.shape[0]:
            return x.new_empty(0, packed.shape[0])
        q, per_token = npu().npu_dynamic_quant(x.contiguous())
        out: Tensor = npu().npu_quant_matmul(
            q,
            packed.tensors["weight"],
            packed.tensors["scale"],
            pertoken_scale=per_token,
            output_dtype=self._dtype,
        )
        return out


def _restore(packed: Packed) -> Tensor:
    held: dict[str, Any] = packed.tensors
    values: Tensor = held["weight"].t().to(torch.float32) * held["scale"].unsqueeze(1)
    return values
