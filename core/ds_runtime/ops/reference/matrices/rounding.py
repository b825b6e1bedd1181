"""Numbers into weight formats: rounding to the nearest code, and the same codes in other words.

`convert_part` is what loading calls, for `--quantize` and for the binder's conversions. A rank
rounds its own shard: where a format's scales cover what ranks share, they may differ from those of
the whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.dtypes import E2M1
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.weight import WeightPart, scale_grid

FP8_MAX, FP4_MAX = 448.0, 6.0
GROUP = 128  # columns per scale where the format leaves it open
_FROM_INTEGERS = frozenset({"int4_group", "w4afp8"})
_ROUNDED = frozenset(FORMATS) - {"dense", "int4_actorder"}
_CODE_MAX = {"mxfp8": FP8_MAX, "mxfp4": FP4_MAX}


# The largest error of an element, over the largest magnitude in its block: half a step at the top
# for floats, a whole one where int4's codes end at 7, and for powers of two what clipping may cost.
LARGEST_ERROR = {
    **dict.fromkeys(("int8_channel", "int8_block", "int8_group"), 0.0041),
    **dict.fromkeys(("int4_group", "w4afp8"), 0.13),
    **dict.fromkeys(("fp8_tensor", "fp8_channel", "fp8_block", "fp8_group"), 0.04),
    "mxfp8": 0.36,
    "nvfp4": 0.18,
    "mxfp4": 0.5,
}
_FLOOR = 2e-4  # of the whole part's largest magnitude: below, scales of few bits end


def quantise_part(
    part: WeightPart, format: str, group: int = GROUP, scales: torch.dtype = torch.float32
) -> WeightPart:
    """The part rounded to the nearest numbers of `format`; `group` columns for the int4 formats,
    integers' scales as `scales` holds them.

    Symmetric, without zero points. The largest magnitude of a block becomes the largest code;
    int4's is −8, which has no positive counterpart, so the scale takes the sign. Powers of two
    are the better of the two that are nearest, by squared error. Raises UnsupportedError for
    "int4_actorder" and unknown formats.
    """
    if format not in _ROUNDED:
        raise UnsupportedError(f"{part.name}: cannot round to weight format {format!r}")
    rows, cols = part.shape
    height, width = FORMATS[format].block
    width = group if FORMATS[format].any_group else width
    block = (height or max(1, rows), width or max(1, cols))
    tiles = _tiles(part.dequantise(), block)  # [row blocks, column blocks, rows · cols]
    tensors: dict[str, Tensor] = {}
    if format in _FROM_INTEGERS:
        least, most = tiles.aminmax(dim=-1)
        scale = (torch.where(most > -least, most, least) / -8).to(scales).to(torch.float32)
        codes = _codes(tiles, scale).round_().clamp_(-8, 7).to(torch.int8)
    elif format.startswith("int8"):
        scale = (tiles.abs().amax(-1) / 127).to(scales).to(torch.float32)
        codes = _codes(tiles, scale).round_().clamp_(-127, 127).to(torch.int8)
    elif format in _CODE_MAX:
        scale, codes = _powers_of_two(tiles, format)
    elif format == "nvfp4":
        scale, codes, tensors["global"] = _nvfp4(tiles)
    else:
        scale = tiles.abs().amax(-1) / FP8_MAX
        codes = to_e4m3(_codes(tiles, scale))
    tensors |= {"weight": _matrix(codes, part.shape, block), "scale": scale}
    return WeightPart(part.name, format, part.shape, tensors, block)


def convert_part(part: WeightPart, format: str, dtype: torch.dtype) -> WeightPart:
    """The part as `format`; "dense" in `dtype`. The same numbers where the formats allow it."""
    if part.format == format:
        return part
    if format == "dense":
        values = part.dequantise(dtype)
        return WeightPart(part.name, "dense", part.shape, {"weight": values})
    same = same_codes(part, format)
    return quantise_part(part, format) if same is None else same


def same_codes(part: WeightPart, format: str) -> WeightPart | None:
    """The part in a format that holds the same numbers, codes kept; None if there is none."""
    tensors, block = dict(part.tensors), part.block
    assert block is not None or part.format == "dense"
    if (part.format, format) == ("w4afp8", "int4_group"):
        tensors.pop("input_scale", None)
        return WeightPart(part.name, format, part.shape, tensors, block, part.offset)
    if part.format == "fp8_tensor" and format in ("fp8_channel", "fp8_block"):
        height, width = FORMATS[format].block
        wide = (height, width or max(1, part.shape[1]))
        grid = FORMATS[format].grid(*part.shape)
        tensors["scale"] = scale_grid(part, torch.float32).expand(grid).contiguous()
        return WeightPart(part.name, format, part.shape, tensors, wide)
    if (part.format, format) == ("mxfp4", "mxfp8"):
        codes = tensors["weight"].to(torch.int64)
        table = torch.tensor((*E2M1, *(-v for v in E2M1)), device=codes.device)
        tensors["weight"] = table[codes].to(torch.float8_e4m3fn)
        return WeightPart(part.name, format, part.shape, tensors, block, part.offset)
    return None


def worst_error(values: Tensor, part: WeightPart) -> float:
    """The largest error of `part` against [rows, cols] float32 values, over the largest magnitude
    in its block; rounding alone stays within LARGEST_ERROR."""
    assert part.block is not None and part.offset == (0, 0)
    if not values.numel():
        return 0.0
    most = _tiles(values, part.block).abs().amax(-1)
    error = _tiles(values - part.dequantise(), part.block).abs().amax(-1)
    over = most + _FLOOR * most.amax()
    return float((error / torch.where(over == 0, 1.0, over)).amax())


def to_e4m3(values: Tensor) -> Tensor:
    """Numbers to the nearest e4m3, the largest finite where they are beyond."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def to_e2m1(values: Tensor) -> Tensor:
    """Numbers to the nearest e2m1 codes, uint8 0 … 15; ties to the even code."""
    size = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for low in range(7):
        middle = (E2M1[low] + E2M1[low + 1]) / 2
        code += size > middle if low % 2 == 0 else size >= middle
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def _tiles(values: Tensor, block: tuple[int, int]) -> Tensor:
    """[rows, cols] → [row blocks, column blocks, elements], filled up with zeros."""
    (rows, cols), (height, width) = values.shape, block
    padded = F.pad(values, (0, -cols % width, 0, -rows % height))
    grid = padded.view(padded.shape[0] // height, height, -1, width)
    return grid.transpose(1, 2).reshape(grid.shape[0], grid.shape[2], height * width)


def _matrix(tiles: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """The inverse of `_tiles`, without the filling."""
    down, across, _ = tiles.shape
    grid = tiles.view(torch.uint8).view(down, across, *block).transpose(1, 2)
    whole = grid.reshape(down * block[0], across * block[1])[: shape[0], : shape[1]]
    return whole.contiguous().view(tiles.dtype)


def _codes(tiles: Tensor, scale: Tensor) -> Tensor:
    """Elements over their block's scale; a block of zeros stays zero."""
    return tiles / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)


def _powers_of_two(tiles: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """(scale bytes, codes) of an mx format."""
    to_codes = to_e4m3 if format == "mxfp8" else to_e2m1
    table = torch.tensor((*E2M1, *(-v for v in E2M1)), device=tiles.device)
    exponent = torch.frexp(tiles.abs().amax(-1) / _CODE_MAX[format])[1]  # 2^exponent is enough
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for less in (0, 1):
        byte = (exponent - less + 127).clamp(0, 254)
        scale = torch.exp2(byte.to(torch.float32) - 127).unsqueeze(-1)
        codes = to_codes(tiles / scale)
        back = codes.to(torch.float32) if format == "mxfp8" else table[codes.to(torch.int64)]
        error = (back * scale - tiles).square().sum(-1)
        if best is None:
            best = (error, byte.to(torch.uint8), codes.view(torch.uint8))
            continue
        better = error < best[0]
        best = (
            error,
            torch.where(better, byte.to(torch.uint8), best[1]),
            torch.where(better.unsqueeze(-1), codes.view(torch.uint8), best[2]),
        )
    assert best is not None
    return best[1], best[2].view(torch.float8_e4m3fn) if format == "mxfp8" else best[2]


def _nvfp4(tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3 scales, codes, global scale): the largest scale is the largest e4m3."""
    most = tiles.abs().amax(-1)
    top = most.amax() if most.numel() else most.new_zeros(())
    whole = torch.where(top == 0, 1.0, top / (FP4_MAX * FP8_MAX)).to(torch.float32)
    scale = to_e4m3(most / FP4_MAX / whole)
    return scale, to_e2m1(_codes(tiles, scale.to(torch.float32) * whole)), whole.view(1)
