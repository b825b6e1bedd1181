"""Torch reference of the activation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.dtypes import wide
from ds_runtime.ops.reference.matrices.linear import quantize_group


def silu_mul(gate_up: Tensor) -> Tensor:
    """Reference of SiluMul: see the contract for `gate_up` and what it returns."""
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype).contiguous()


def silu_mul_quantize(gate_up: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Reference of SiluMulQuantize: the composition."""
    return quantize_group(silu_mul(gate_up), group, ue8m0)
