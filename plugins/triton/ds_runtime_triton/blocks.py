"""FP8 and int8 weights as the kernels read them: plain rows, and scales over regular groups.

A checkpoint's grid of 128 × 128 blocks may be cut by a shard and change its phase where weights are
joined. Scales are therefore kept for the largest group of rows that no cut divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from ds_runtime.api import Weight, WeightPart, decode_scale, fp8_blocks
from ds_runtime_triton.launch import cdiv

FP8 = torch.float8_e4m3fn
BLOCK = 128  # rows and columns of one scale in FP8_ROWS and FP8_EXPERTS
LEAST_GROUP = 32  # columns of one scale; the matrix unit takes no fewer
WHOLE_GROUP = 128  # columns that are multiplied together where all of a row share a scale


@dataclass(frozen=True)
class Blocks:
    """values [rows, cols] e4m3 or int8; scale [⌈rows / group_n⌉, ⌈cols / group_k⌉] float32, or one
    column for all of a row's groups."""

    values: Tensor
    scale: Tensor
    group_n: int
    group_k: int
    ue8m0: bool

    @property
    def step(self) -> int:
        """From a group's scale to the next one's."""
        return scale_step(self.scale, self.values.shape[1], self.group_k)


def scale_step(scale: Tensor, cols: int, group_k: int) -> int:
    """1, or 0 if scales [..., 1] serve all groups of `cols` columns."""
    return 0 if scale.shape[-1] == 1 and cols > group_k else 1


def by_row(weight: Weight) -> bool:
    """Whether all columns share a scale, in every part."""
    return all(p.format == "int8_channel" for p in weight.parts)


def column_group(weight: Weight) -> int:
    """Columns that share a scale in every part, a power of two; 0 if no kernel takes so few."""
    width = 0
    formats = {part.format for part in weight.parts}
    if len(formats) > 1 or not formats <= {"fp8_block", "int8_block", "int8_channel"}:
        return 0
    for part in weight.parts:
        if part.block is None or part.dequantiser:
            return 0
        width = gcd(width, part.block[1], part.offset[1])
    if by_row(weight):
        return WHOLE_GROUP
    whole = width % LEAST_GROUP == 0 and width & (width - 1) == 0
    return width if whole else 0


def row_group(weight: Weight) -> int:
    """Rows that share a scale in every part, wherever a part begins."""
    group, start = 0, 0
    for part in weight.parts:
        assert part.block is not None
        group = gcd(group, part.block[0], part.offset[0], start)
        start += part.shape[0]
    return group


def grid_of(part: WeightPart, group_n: int, group_k: int) -> Tensor:
    """The part's scales, one per group_n rows and group_k columns of the part itself, float32; one
    column if all columns share a scale."""
    assert part.block is not None
    scale = decode_scale(part.tensors["scale"], torch.float32)
    if part.format == "int8_channel":
        return scale[: part.shape[0], :1]
    groups = (group_n, group_k)
    for dim, (block, offset, size, group) in enumerate(
        zip(part.block, part.offset, part.shape, groups, strict=True)
    ):
        first, count = offset // group, cdiv(size, group)
        if block != group:
            scale = scale.repeat_interleave(block // group, dim)
        if scale.shape[dim] != count:
            scale = scale.narrow(dim, first, count)
    return scale


def read_blocks(weight: Weight) -> Blocks | None:
    """The weight kept as it is, or None if a cut leaves groups that no kernel takes."""
    group_k = column_group(weight)
    if not group_k:
        return None
    group_n = row_group(weight)
    values = [p.tensors["weight"] for p in weight.parts]
    scale = torch.cat([grid_of(p, group_n, group_k) for p in weight.parts]).contiguous()
    joined = values[0].contiguous() if len(values) == 1 else torch.cat(values)
    return Blocks(joined, scale, group_n, group_k, fp8_blocks.powers_of_two(scale))


def wide_values(values: Tensor, scale: Tensor, group_n: int, group_k: int) -> Tensor:
    """[rows, cols] float32 of values and their scales."""
    rows, cols = values.shape
    group_k = group_k if scale_step(scale, cols, group_k) else cols
    by_row = scale.repeat_interleave(group_n, 0)[:rows]
    return values.to(torch.float32) * by_row.repeat_interleave(group_k, 1)[:, :cols]
