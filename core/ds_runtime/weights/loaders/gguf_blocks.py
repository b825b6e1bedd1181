"""Parts of Linears out of GGUF files, in the canonical form of their format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_runtime.checkpoint.gguf.blocks import BLOCKS, INTEGERS, values
from ds_runtime.errors import CheckpointError
from ds_runtime.ops.weight import WeightPart

if TYPE_CHECKING:
    from ds_runtime.checkpoint.shards import Checkpoint
    from ds_runtime.weights.place import PartRequest

_DEQUANTISER = "ds_runtime.weights.loaders.gguf_blocks:dequantise"


def read_part(request: PartRequest) -> WeightPart:
    """The rows and columns of the request. CheckpointError for shapes that config.json denies."""
    from ds_runtime.weights import quant

    layout = request.encoding.layout
    if layout == "blocks":
        return _blocks(request)
    if layout == "kv_halves":
        return _kv_b(request)
    return quant.read_part(request)


def _blocks(request: PartRequest) -> WeightPart:
    """A weight in blocks along its rows: codes and scales, or for formats that have minima the
    bytes of the blocks that cover the columns."""
    checkpoint, name = request.checkpoint, request.place.tensors["weight"]
    kind = BLOCKS[checkpoint.entry(name).dtype]
    raw = checkpoint.row_bytes(name, request.rows, request.device)
    first = request.cols.start // kind.elements
    last = max(first, -(-request.cols.stop // kind.elements))
    rows, cols = raw.shape[0], request.cols.stop - request.cols.start
    skip = request.cols.start - first * kind.elements
    raw = raw.view(rows, -1, kind.nbytes)[:, first:last].contiguous()
    shape, format = (rows, cols), request.encoding.format
    if kind.name not in INTEGERS:
        scales = raw.view(-1, kind.nbytes)[:, :4].contiguous().view(torch.float16)
        _check(checkpoint, name, scales.view(rows, -1))
        tensors = {"weight": raw.view(rows, (last - first) * kind.nbytes)}
        return WeightPart(
            request.module, format, shape, tensors, offset=(0, skip), dequantiser=_DEQUANTISER
        )
    codes, scale = INTEGERS[kind.name](raw.view(-1, kind.nbytes))
    codes = codes.view(rows, -1)[:, skip : skip + cols].contiguous()
    group = kind.elements // scale.shape[1]
    scale = scale.view(rows, -1)[:, skip // group :].contiguous()
    _check(checkpoint, name, scale)
    tensors = {"weight": codes, "scale": scale}
    return WeightPart(request.module, format, shape, tensors, (1, group), (0, skip % group))


def _check(checkpoint: Checkpoint, name: str, scale: Tensor) -> None:
    """CheckpointError if one of a tensor's scales [rows, groups] is no number."""
    bad = ~checkpoint.nan.is_good(scale)
    if bool(bad.any()):
        row, group = (int(i[0]) for i in bad.nonzero(as_tuple=True))
        file, value = checkpoint.entry(name).file, float(scale[row, group])
        raise CheckpointError(
            f"{file}: {name}: a scale is {value}, that of row {row}, group {group} of the part "
            f"read, expected a finite number; {checkpoint.nan.remedy}"
        )


def dequantise(part: WeightPart, dtype: torch.dtype) -> Tensor:
    """The values of a part that holds blocks: its format is the type's name in small letters."""
    skip = part.offset[1]
    found = values(part.format.upper(), part.tensors["weight"])
    return found[:, skip : skip + part.shape[1]].to(dtype)


def _kv_b(request: PartRequest) -> WeightPart:
    """kv_b_proj of keys [heads, latent, nope], which are transposed, and values [heads, v, latent]:
    a head's rows are those of its keys, then those of its values."""
    checkpoint, tensors = request.checkpoint, request.place.tensors
    names = tensors["weight"], tensors["values"]
    of_keys, of_values = (checkpoint.entry(n).shape for n in names)
    rows, cols = request.place.shape
    heads, nope, v = of_keys[0], of_keys[-1], of_values[len(of_values) // 2]
    made = heads * (nope + v) == rows
    if not made or (of_keys, of_values) != ((heads, cols, nope), (heads, v, cols)):
        raise CheckpointError(
            f"{names[0]} and {names[1]}: shapes {list(of_keys)} and {list(of_values)} found, which "
            f"together do not make the {[rows, cols]} expected from config.json"
        )
    keys = checkpoint.read(names[0], device=request.device)
    below = checkpoint.read(names[1], device=request.device)
    dtype = below.dtype if keys.dtype == below.dtype else torch.float32
    halves = (keys.transpose(1, 2).to(dtype), below.to(dtype))
    whole = torch.cat(halves, dim=1).reshape(rows, cols)
    part = whole[request.rows, request.cols].contiguous()
    shape = (part.shape[0], part.shape[1])
    return WeightPart(request.module, "dense", shape, {"weight": part})
