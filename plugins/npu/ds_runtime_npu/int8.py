"""Int8 weights with a scale per row, as the vendor's matmuls take them."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Weight, decode_scale

_MOST = 127.0


def rows(weight: Weight) -> tuple[Tensor, Tensor]:
    """(int8 [out, in], float32 scales [out]) of all parts; with zero points, rounded once more."""
    if any("zero" in p.tensors for p in weight.parts):
        values = weight.dequantise(torch.float32)
        scale = values.abs().amax(1).clamp(min=1e-12) / _MOST
        return (values / scale.unsqueeze(1)).round().to(torch.int8), scale
    codes = torch.cat([p.tensors["weight"] for p in weight.parts])
    scales = [decode_scale(p.tensors["scale"], torch.float32).reshape(-1) for p in weight.parts]
    return codes, torch.cat(scales)
