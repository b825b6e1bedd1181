"""FP8 block weights as matrix libraries want them: whole 128×128 blocks from the start."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Packed, Weight, decode_scale

BLOCK = 128


def join(weight: Weight) -> tuple[Tensor, Tensor] | None:
    """(e4m3 [rows, cols], float32 scales [row blocks, column blocks]) of all parts, one below the
    other; None where a part begins inside a block, or ends inside one before the last.
    """
    last = weight.parts[-1]
    for part in weight.parts:
        if part.block != (BLOCK, BLOCK) or part.offset != (0, 0):
            return None
        if part is not last and part.shape[0] % BLOCK:
            return None
    cols = -(-weight.shape[1] // BLOCK)
    values = torch.cat([part.tensors["weight"].view(torch.uint8) for part in weight.parts])
    scales = [
        decode_scale(part.tensors["scale"][: -(-part.shape[0] // BLOCK), :cols], torch.float32)
        for part in weight.parts
    ]
    return values.view(torch.float8_e4m3fn), torch.cat(scales).contiguous()


def spread(values: Tensor, scales: Tensor) -> Tensor:
    """Back to float32: [..., rows, cols] from e4m3 and its block scales."""
    rows, cols = values.shape[-2:]
    wide = scales.repeat_interleave(BLOCK, -2)[..., :rows, :]
    return values.to(torch.float32) * wide.repeat_interleave(BLOCK, -1)[..., :cols]


def restore(packed: Packed) -> Tensor:
    """`Packed.restore` of tensors "weight" and "scale", or "dense"."""
    tensors = packed.tensors
    if "dense" in tensors:
        dense: Tensor = tensors["dense"]
        return dense.to(torch.float32)
    return spread(tensors["weight"], tensors["scale"])
