"""FP8 weights in aligned blocks of 128 × 128, as matrix libraries read them."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import decode_scale
from ds_runtime.ops.weight import Packed, Weight

BLOCK = 128


def join(weight: Weight) -> tuple[Tensor, Tensor] | None:
    """Returns the blocks of all parts of `weight`, one below the other: (e4m3 [rows, cols], float32
    scales [row blocks, column blocks]). Returns None if a part begins inside a block, or ends
    inside one before the last.
    """
    last = weight.parts[-1]
    for part in weight.parts:
        if part.block != (BLOCK, BLOCK) or part.offset != (0, 0):
            return None
        if part is not last and part.shape[0] % BLOCK:
            return None
    cols = -(-weight.shape[1] // BLOCK)
    values, scales = [], []
    for part in weight.parts:
        rows = -(-part.shape[0] // BLOCK)
        values.append(part.tensors["weight"].view(torch.uint8))
        scales.append(decode_scale(part.tensors["scale"][:rows, :cols], torch.float32))
    joined = torch.cat(values).view(torch.float8_e4m3fn)
    return joined, torch.cat(scales).contiguous()


def spread(values: Tensor, scales: Tensor) -> Tensor:
    """Returns float32 [..., rows, cols]. values: codes of 8 bits. scales: one for each block."""
    rows, cols = values.shape[-2:]
    wide = scales.repeat_interleave(BLOCK, -2)[..., :rows, :]
    return values.to(torch.float32) * wide.repeat_interleave(BLOCK, -1)[..., :cols]


def powers_of_two(scale: Tensor) -> bool:
    """Returns whether all scales are, float32 or float64. Those of activations then are, too."""
    return bool((torch.frexp(scale)[0] == 0.5).all())


def dense(weight: Weight, tag: str) -> Packed:
    """Returns a shard that cuts a block, which no such matmul takes, in bfloat16, as tensor
    `dense`.
    """
    held = weight.dequantise(torch.bfloat16)
    return Packed(tag, weight.shape, {"dense": held}, held.nbytes, restore)


def packed(weight: Weight, tag: str, form: str = "") -> Packed:
    """Returns the blocks of `join` as tensors `weight` and `scale`, or `dense` where it has none.

    tag: the kernel's own. form: under which other kernels read the blocks, too (default: tag).
    """
    joined = join(weight)
    if joined is None:
        return dense(weight, tag)
    values, scale = joined
    tensors = {"weight": values, "scale": scale}
    return Packed(form or tag, weight.shape, tensors, values.nbytes + scale.nbytes, restore)


def restore(packed: Packed) -> Tensor:
    """For `Packed.restore` of tensors `weight` and `scale`, or `dense`. Returns float32."""
    tensors = packed.tensors
    if "dense" in tensors:
        held: Tensor = tensors["dense"]
        return held.to(torch.float32)
    return spread(tensors["weight"], tensors["scale"])
