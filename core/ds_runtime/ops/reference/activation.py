"""Torch reference of the activation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.reference.formats import wide


def silu_mul(gate_up: Tensor) -> Tensor:
    """Reference of SiluMul."""
    gate, up = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype).contiguous()
