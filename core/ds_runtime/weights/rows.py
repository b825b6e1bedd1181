"""A part of a Linear with its rows in another order, or with more of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.weight import WeightPart


def with_order(part: WeightPart, rows: Tensor) -> WeightPart:
    """The part with its rows in another order: new row → old row.

    UnsupportedError where rows would leave the block whose scale they share with others.
    """
    rows = rows.to(part.tensors["weight"].device)
    tensors = {**part.tensors, "weight": _rows_of(part.tensors["weight"], rows)}
    if part.block is not None and part.block[0] == 1:
        grids = {"scale", "zero"} & part.tensors.keys()
        tensors |= {name: _rows_of(part.tensors[name], rows) for name in grids}
    elif part.block is not None:
        height, first = part.block[0], part.offset[0]
        places = torch.arange(len(rows), device=rows.device)
        if not torch.equal((rows + first) // height, (places + first) // height):
            raise UnsupportedError(
                f"config.json: rope_interleave false with {part.format} weights is not supported "
                f"if rotated rows are in two blocks of {height} rows, as those of {part.name}; "
                "convert the checkpoint to bfloat16"
            )
    return replace(part, tensors=tensors)


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """These rows, by their bytes: not every dtype can be indexed."""
    return tensor.contiguous().view(torch.uint8)[rows].view(tensor.dtype)


def with_rows(part: WeightPart, rows: int) -> WeightPart:
    """The part with rows of zeros below, so that it has this many."""
    if part.shape[0] == rows:
        return part
    tensors = {**part.tensors, "weight": _below(part.tensors["weight"], rows, 0)}
    block = part.block
    if block is not None:
        whole = not FORMATS[part.format].block[0]
        block = (max(block[0], rows), block[1]) if whole else block
        grid = -(-(rows + part.offset[0]) // block[0])
        tensors["scale"] = _below(part.tensors["scale"], grid, 1)
        if "zero" in tensors:
            tensors["zero"] = _below(part.tensors["zero"], grid, 0)
    return replace(part, shape=(rows, part.shape[1]), tensors=tensors, block=block)


def _below(tensor: Tensor, rows: int, value: int) -> Tensor:
    """Rows of one value below, by their bytes: not every dtype can be joined."""
    more = torch.full((rows - tensor.shape[0], tensor.shape[1]), value, device=tensor.device)
    if value and tensor.dtype == torch.uint8:
        more += 126  # the exponent byte of 1
    added = more.to(torch.float32).to(tensor.dtype)
    return torch.cat((tensor.view(torch.uint8), added.view(torch.uint8))).view(tensor.dtype)
