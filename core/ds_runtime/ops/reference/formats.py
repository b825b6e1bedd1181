"""Weight formats back to plain numbers: the meaning of each.

Used by every `WeightPart.dequantise`, so by references, by conformance, and by kernels that
convert at pack time. Works slab by slab so that a big matrix never exists twice in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.formats import BLOCKED
from ds_runtime.ops.spec import load_attr

if TYPE_CHECKING:
    from ds_runtime.ops.weight import WeightPart

_SLAB_ELEMENTS = 1 << 22
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same, negative
_FOUR_BIT_FLOATS = frozenset({"nvfp4", "mxfp4"})


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a facts string ("bfloat16", "float64", …)."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"dtype {name!r} is none of torch's")
    return dtype


FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether the dtype has eight bits, for which torch has few operations."""
    return dtype in FP8


def wide(dtype: torch.dtype) -> torch.dtype:
    """What statistics and accumulations are computed in: float32 at least, float64 stays."""
    return torch.float64 if dtype == torch.float64 else torch.float32


FP8_MAX = 448.0  # of e4m3


def fp8_vectors(x: Tensor, ue8m0: bool = True) -> tuple[Tensor, Tensor]:
    """(e4m3 [..., n], scale [...] in x's dtype): x ≈ their product.

    scale = max(amax, 1e-4) / 448, rounded up to a power of two if `ue8m0`.
    """
    scale = x.abs().amax(-1).clamp(min=1e-4) / FP8_MAX
    if ue8m0:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa · 2^exponent, mantissa in [½, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    q = (x / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return q.to(torch.float8_e4m3fn), scale


def decode_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as `dtype` numbers. One byte per scale means 2^(byte − 127), 255 being NaN."""
    if scale.dtype == torch.uint8 or scale.dtype == torch.float8_e8m0fnu:
        byte = scale.view(torch.uint8)
        value = torch.exp2(byte.to(torch.float64) - 127)
        return value.masked_fill(byte == 255, float("nan")).to(dtype)
    return scale.to(dtype)


def decode_codes(part: WeightPart, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
    """The codes of these rows as `dtype` numbers: [rows, cols]."""
    codes = part.tensors["weight"][rows]
    if part.format in _FOUR_BIT_FLOATS:
        table = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=dtype, device=codes.device)
        return table[codes.to(torch.int32)]
    return codes.to(dtype)


def scale_grid(part: WeightPart, dtype: torch.dtype) -> Tensor:
    """All that codes are multiplied with, per block: scales times the global one."""
    scale = decode_scale(part.tensors["scale"], dtype)
    whole = part.tensors.get("global")
    return scale if whole is None else scale * whole.to(dtype)


def _dequantise_block(part: WeightPart, dtype: torch.dtype) -> Tensor:
    """(code − zero) · scale, with one scale (and zero) per block."""
    weight, compute = part.tensors["weight"], wide(dtype)
    block, (row0, col0) = part.block, part.offset
    if block is None:
        raise UnsupportedError(f"{part.name}: format {part.format!r} needs a block size")
    rows, cols = part.shape
    scale = scale_grid(part, compute)
    zero, group = part.tensors.get("zero"), part.tensors.get("group")
    down, across = (
        -(-(n + o) // b) for n, o, b in zip(part.shape, part.offset, block, strict=True)
    )
    if group is not None:
        across = int(group.max()) + 1 if group.numel() else 0
    if scale.shape[0] < down or scale.shape[1] < across:
        raise UnsupportedError(
            f"{part.name}: scale grid {tuple(scale.shape)} does not cover {part.shape} with blocks "
            f"of {block} from offset {part.offset}; it must be at least {(down, across)}"
        )
    scale = _columns(scale, block[1], col0, cols, group)
    if zero is not None:
        zero = _columns(zero.to(compute), block[1], col0, cols, group)
    out = torch.empty(rows, cols, dtype=dtype, device=weight.device)
    step = max(1, _SLAB_ELEMENTS // max(1, cols))
    for r0 in range(0, rows, step):
        r1 = min(rows, r0 + step)
        first = (r0 + row0) // block[0]
        last = (r1 - 1 + row0) // block[0] + 1
        skip = r0 + row0 - first * block[0]
        inside = slice(skip, skip + r1 - r0)
        values = decode_codes(part, compute, slice(r0, r1))
        if zero is not None:
            values = values - zero[first:last].repeat_interleave(block[0], dim=0)[inside]
        out[r0:r1] = values * scale[first:last].repeat_interleave(block[0], dim=0)[inside]
    return out


def _columns(
    grid: Tensor, width: int, start: int, count: int, group: Tensor | None = None
) -> Tensor:
    """[row blocks, column blocks] → [row blocks, count] columns, from column `start` on, or of
    the block that `group` names."""
    if group is not None:
        return grid[:, group.to(torch.int64)]
    if grid.shape[1] == 1:
        return grid.expand(-1, count)
    return grid.repeat_interleave(width, dim=1)[:, start : start + count]


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
    if part.format in BLOCKED:
        return _dequantise_block(part, dtype)
    raise UnsupportedError(
        f"{part.name}: weight format {part.format!r} has no dequantiser; known are 'dense', "
        f"{', '.join(map(repr, BLOCKED))}; other formats name one in WeightPart.dequantiser"
    )
