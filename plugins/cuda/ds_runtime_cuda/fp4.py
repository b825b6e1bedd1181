"""Weights of few bits as FlashInfer's kernels take them: codes packed, scales with one global.

Two e2m1 codes to a byte, the first below. NVFP4 has an e4m3 scale per 16 inputs and one float32 per
weight; MXFP4 and MXFP8 a power of two per 32 inputs, one byte (e8m0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Weight, WeightPart

TOP = 448.0 * 6.0  # the largest scale times the largest code
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def aligned(weight: Weight, group: int) -> bool:
    """Whether every part begins with a group of columns, and ends with one."""
    return all(p.offset == (0, 0) and p.shape[1] % group == 0 for p in weight.parts)


def codes(weight: Weight) -> Tensor:
    """[rows, cols / 2] uint8 of all parts, one below the other."""
    every = torch.cat([p.tensors["weight"] for p in weight.parts])
    return every[:, 0::2] | every[:, 1::2] << 4


def exponents(weight: Weight) -> Tensor:
    """The e8m0 bytes [rows, cols / 32] of all parts."""
    return torch.cat([p.tensors["scale"].view(torch.uint8) for p in weight.parts])


def scales(weight: Weight) -> tuple[Tensor, float]:
    """(e4m3 scales [rows, cols / 16] of all parts, their one global).

    Parts under another global than the largest have their scales rounded to it.
    """
    globals_ = [float(_global(p)) for p in weight.parts]
    top = max(globals_)
    rescaled = [
        p.tensors["scale"]
        if g == top
        else (p.tensors["scale"].to(torch.float32) * (g / top)).to(torch.float8_e4m3fn)
        for p, g in zip(weight.parts, globals_, strict=True)
    ]
    return torch.cat([s.view(torch.uint8) for s in rescaled]).view(torch.float8_e4m3fn), top


def _global(part: WeightPart) -> Tensor:
    found: Tensor = part.tensors["global"]
    return found


def wide(packed: Tensor, scale: Tensor, group: int) -> Tensor:
    """Back to float32, without the global: [..., rows, cols] from codes and plain scales."""
    data = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int64)
    table = torch.tensor((*_E2M1, *(-v for v in _E2M1)), device=packed.device)
    spread: Tensor = scale.to(torch.float32).repeat_interleave(group, -1)
    return table[data] * spread
