"""Weight formats back to plain numbers: the meaning of "dense" and "fp8_block".

Used by every `WeightPart.dequantise`, so by references, by conformance, and by kernels that
convert at pack time. Works slab by slab so that a big matrix never exists twice in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.spec import load_attr

if TYPE_CHECKING:
    from ds_runtime.ops.weight import WeightPart

_SLAB_ELEMENTS = 1 << 22


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a facts string ("bfloat16", "float64", …)."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"dtype {name!r} is none of torch's")
    return dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """What statistics and accumulations are computed in: float32 at least, float64 stays."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def decode_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as `dtype` numbers. One byte per scale means 2^(byte − 127), 255 being NaN."""
    if scale.dtype == torch.uint8 or scale.dtype == torch.float8_e8m0fnu:
        byte = scale.view(torch.uint8)
        value = torch.exp2(byte.to(torch.float64) - 127)
        return value.masked_fill(byte == 255, float("nan")).to(dtype)
    return scale.to(dtype)


def _dequantise_block(part: WeightPart, dtype: torch.dtype) -> Tensor:
    weight, compute = part.tensors["weight"], wide(dtype)
    block, (row0, col0) = part.block, part.offset
    if block is None:
        raise UnsupportedError(f"{part.name}: format 'fp8_block' needs a block size")
    rows, cols = part.shape
    scale = decode_scale(part.tensors["scale"], compute)
    grid = tuple(-(-(n + o) // b) for n, o, b in zip(part.shape, part.offset, block, strict=True))
    if scale.shape[0] < grid[0] or scale.shape[1] < grid[1]:
        raise UnsupportedError(
            f"{part.name}: scale grid {tuple(scale.shape)} does not cover {part.shape} with blocks "
            f"of {block} from offset {part.offset}; it must be at least {grid}"
        )
    scale = scale.repeat_interleave(block[1], dim=1)[:, col0 : col0 + cols]  # [row blocks, cols]
    out = torch.empty(rows, cols, dtype=dtype, device=weight.device)
    step = max(1, _SLAB_ELEMENTS // max(1, cols))
    for r0 in range(0, rows, step):
        r1 = min(rows, r0 + step)
        first = (r0 + row0) // block[0]
        last = (r1 - 1 + row0) // block[0] + 1
        skip = r0 + row0 - first * block[0]
        slab = scale[first:last].repeat_interleave(block[0], dim=0)[skip : skip + r1 - r0]
        out[r0:r1] = weight[r0:r1].to(compute) * slab
    return out


def dequantise_part(part: WeightPart, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logical [rows, cols] values of one part in `dtype`, a new or the stored tensor.

    Products are computed in float32, or in float64 when that is asked. A part with its own
    `dequantiser` ("module:attr") is decoded by that.
    """
    if part.dequantiser:
        values = load_attr(part.dequantiser)(part, dtype)
        assert isinstance(values, Tensor)
        return values
    if part.format == "dense":
        return part.tensors["weight"].to(dtype)
    if part.format == "fp8_block":
        return _dequantise_block(part, dtype)
    raise UnsupportedError(
        f"{part.name}: weight format {part.format!r} has no dequantiser; known are 'dense' and "
        "'fp8_block', other formats name one in WeightPart.dequantiser"
    )
