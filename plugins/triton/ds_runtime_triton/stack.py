"""One matrix of every expert, as the kernels read it: numbers, or codes and scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_runtime.api import Weight
from ds_runtime_triton.blocks import (
    by_row,
    column_group,
    grid_of,
    row_group,
    scale_step,
    wide_values,
)
from ds_runtime_triton.launch import cdiv


@dataclass
class Stack:
    """One matrix of every expert: values [experts, …, rows, cols]. In FP8 or int8 with scales
    [experts, …, ⌈rows / group_n⌉, ⌈cols / group_k⌉ or 1], where group_k is not 0."""

    values: Tensor
    scale: Tensor
    group_n: int = 1
    group_k: int = 0

    @property
    def step(self) -> int:
        """From a group's scale to the next one's."""
        return scale_step(self.scale, self.values.shape[-1], self.group_k)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (self.scale.nbytes if self.group_k else 0)

    def wide(self) -> Tensor:
        """Logical values, float32, the leading dimensions flattened: [experts · …, rows, cols]."""
        values = self.values.flatten(0, -3)
        if not self.group_k:
            return values.to(torch.float32)
        pairs = zip(values, self.scale.flatten(0, -3), strict=True)
        return torch.stack([wide_values(v, s, self.group_n, self.group_k) for v, s in pairs])


def dense_stack(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Stack:
    return Stack(
        torch.empty(shape, dtype=dtype, device=device),
        torch.empty(1, dtype=torch.float32, device=device),
    )


def scaled_stack(shape: tuple[int, ...], like: Weight) -> Stack:
    """Empty, for weights that are cut like this one."""
    group_n, group_k = row_group(like), column_group(like)
    values = like.parts[0].tensors["weight"]
    device = values.device
    across = 1 if by_row(like) else cdiv(shape[-1], group_k)
    grid = (*shape[:-2], cdiv(shape[-2], group_n), across)
    return Stack(
        torch.empty(shape, dtype=values.dtype, device=device),
        torch.empty(grid, dtype=torch.float32, device=device),
        group_n,
        group_k,
    )


def fill(stack: Stack, at: tuple[int, ...], weight: Weight) -> None:
    if not stack.group_k:
        stack.values[at] = weight.dequantise(stack.values.dtype)
        return
    # As few calls as can be: each hands the interpreter's lock to the threads that read ahead.
    values, scale, rows = stack.values[at], stack.scale[at], 0
    if len(weight.parts) == 1:
        values.copy_(weight.parts[0].tensors["weight"])
        scale.copy_(grid_of(weight.parts[0], stack.group_n, stack.group_k))
        return
    for part in weight.parts:
        grid = grid_of(part, stack.group_n, stack.group_k)
        below, first = rows + part.shape[0], rows // stack.group_n
        values[rows:below] = part.tensors["weight"]
        scale[first : first + grid.shape[0]] = grid
        rows = below
