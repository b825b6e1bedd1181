"""What torch itself brings for Intel GPUs: oneDNN's matmuls, dense and with FP8 group scales."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import Facts, Packed, ReferenceLinear, Weight, fp8_blocks

_GROUP, _LEAST, _MAX = 128, 1e-4, 448.0


@cache
def _library() -> Any:
    """Importing it registers torch.ops._C."""
    return import_module("vllm_xpu_kernels.fused_moe_interface")


class LinearOneDnn(ReferenceLinear):
    """y = x · Wᵀ in the compute dtype."""

    tag = "xpu.onednn_linear"


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [tokens, n] → (e4m3 [tokens, n], float32 scales [tokens, n / 128]), scale amax / 448."""
    x = x.contiguous()
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(x.shape[0], x.shape[1] // _GROUP, dtype=torch.float32)
    torch.ops._C.per_token_group_fp8_quant(
        x, q, scale, _GROUP, _LEAST, -_MAX, _MAX, False, False, False
    )
    return q, scale


class LinearScaledMm:
    """y = x · Wᵀ in FP8 through torch's scaled_mm, with 1×128 by 128×128 scales."""

    tag = "xpu.scaled_mm_linear"

    def __init__(self, facts: Facts) -> None:
        _library()

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        return fp8_blocks.packed(weight, self.tag)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if "dense" in packed.tensors:
            return F.linear(x, packed.tensors["dense"])
        if not x.shape[0]:
            return x.new_empty(0, packed.shape[0])
        q, scale = quantise(x)
        return F.scaled_mm(
            q,
            packed.tensors["weight"].t(),
            scale,
            F.ScalingType.BlockWise1x128,
            packed.tensors["scale"].t(),  # [column blocks, row blocks]
            F.ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )
