"""One shard of a conversion: written item by item, each read back and compared at once.

A file is called NAME.partial until its last tensor is there. What a killed run left of it is kept,
but for the last item, which may not have been compared.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import DTYPES
from ds_runtime.errors import CheckpointError, ConfigError
from ds_runtime.ops.contract import Encoding
from ds_runtime.ops.dtypes import decode_scale
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.reference.matrices.rounding import (
    LARGEST_ERROR,
    quantise_part,
    same_codes,
    worst_error,
)
from ds_runtime.ops.weight import WeightPart
from ds_runtime.weights.quant import Quant
from ds_runtime_convert.layout import Item, ShardPlan
from ds_runtime_convert.packing import packed, planned, stored_scale
from ds_runtime_convert.source import Source, read_whole

PARTIAL = ".partial"


@dataclass
class Errors:
    """Squared sums over what was rounded, by format."""

    error: dict[str, float] = field(default_factory=dict)
    value: dict[str, float] = field(default_factory=dict)

    def add(self, format: str, values: Tensor, back: Tensor) -> None:
        """One Linear's values and what its rounded form means."""
        for sums, x in ((self.error, values - back), (self.value, values)):
            sums[format] = sums.get(format, 0.0) + float(x.square().sum(dtype=torch.float64))

    def relative(self) -> dict[str, float]:
        """Root mean square error over root mean square value."""
        return {f: (e / (self.value[f] or 1.0)) ** 0.5 for f, e in self.error.items()}


class Writer:
    """Writes shards of `source` as `quant` says. scale: safetensors dtype of open scales."""

    def __init__(self, source: Source, quant: Quant, scale: str) -> None:
        self.source, self.quant, self.scale = source, quant, scale
        self.errors = Errors()

    def shard(self, folder: Path, plan: ShardPlan, advance: Callable[[int], None]) -> None:
        """Write what is missing of one shard; `advance` gets the bytes of each item."""
        final = folder / plan.name
        if final.exists():
            advance(sum(item.nbytes for item in plan.items))
            return
        path = folder / (plan.name + PARTIAL)
        with path.open("ab") as handle:
            _lock(handle, path)
            done = _resume(handle, path, plan)
            reader = Checkpoint(folder, plan.entries(path))
            try:
                for number, item in enumerate(plan.items):
                    if number >= done:
                        self._item(handle, reader, item)
                    advance(item.nbytes)
            finally:
                reader.close()
            os.fsync(handle.fileno())
            os.replace(path, final)

    def _item(self, handle: BinaryIO, reader: Checkpoint, item: Item) -> None:
        """One item behind what the file holds, and back."""
        if item.encoding is None or item.encoding.format == "dense":
            self._plain(handle, reader, item)
            return
        part = self.source.part(item.module)
        values = part.dequantise()
        _check_numbers(item.module, values)
        made = packed(self._recoded(part, values, item.encoding), item.encoding, self.scale)
        _append(handle, made, item)
        back = read_whole(self.quant, reader, item.module, item.place(), item.shape)
        error, most = worst_error(values, back), LARGEST_ERROR[back.format]
        if not error <= most:
            raise CheckpointError(
                f"{item.module}: reads back as {back.format} with an error of {error:.3g} of the "
                f"largest value nearby, expected at most {most:.3g}. The checkpoint holds values "
                "that are no numbers, or the disk is faulty"
            )
        self.errors.add(back.format, values, back.dequantise())

    def _plain(self, handle: BinaryIO, reader: Checkpoint, item: Item) -> None:
        """A tensor that is copied, or a Linear as numbers."""
        target = item.components["weight"]
        dtype = DTYPES[target.dtype]
        if item.module:
            tensor = self.source.part(item.module).dequantise(dtype)
            _check_numbers(item.module, tensor)
        else:
            tensor = self.source.tensor(target.name).to(dtype)
        _append(handle, {"weight": tensor}, item)
        if not _same_bytes(reader.read(target.name), tensor):
            raise CheckpointError(
                f"{target.name}: reads back with other bytes than were written: the disk is faulty"
            )

    def _recoded(self, part: WeightPart, values: Tensor, encoding: Encoding) -> WeightPart:
        """The part in the output's format, with the codes that it has where they mean the same."""
        same = part if part.format == encoding.format else same_codes(part, encoding.format)
        scale = DTYPES[planned(encoding, part.shape, self.scale)["scale"][0]]
        _, group = encoding.block or FORMATS[encoding.format].block
        if same is not None and "zero" not in same.tensors and same.block is not None:
            held = same.tensors["scale"]
            fits = torch.equal(
                decode_scale(stored_scale(held, scale), torch.float64),
                decode_scale(held, torch.float64),
            )
            if fits and same.block[1] == (group or part.shape[1]):
                return same
        dense = WeightPart(part.name, "dense", part.shape, {"weight": values})
        return quantise_part(dense, encoding.format, group, scale)


def _append(handle: BinaryIO, tensors: Mapping[str, Tensor], item: Item) -> None:
    """The item's tensors at the end of the file, flushed."""
    for component, target in item.components.items():
        data = tensors[component].contiguous().reshape(-1).view(torch.uint8)
        assert data.numel() == target.nbytes, target
        handle.write(data.numpy().data)
    handle.flush()


def _check_numbers(module: str, values: Tensor) -> None:
    """CheckpointError if one of a Linear's values is NaN or infinite."""
    wrong = ~torch.isfinite(values)
    if bool(wrong.any()):
        row, col = wrong.nonzero()[0].tolist()
        raise CheckpointError(
            f"{module}: value [{row}, {col}] of the checkpoint is {float(values[row, col])} in "
            f"{str(values.dtype).removeprefix('torch.')}, expected a finite number; the file is "
            "damaged: download it again"
        )


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*flat)


def _lock(handle: BinaryIO, path: Path) -> None:
    """Nobody else may write this file."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise ConfigError(f"{path}: another process is writing it; wait for it to end") from e


def _resume(handle: BinaryIO, path: Path, plan: ShardPlan) -> int:
    """Write the header, or cut the file behind the items that are known good: their number."""
    size = path.stat().st_size
    ends = list(plan.ends())
    done = max(0, sum(end <= size for end in ends) - 1)
    handle.truncate(ends[done - 1] if done else 0)
    if not done:
        handle.write(plan.header)
        handle.flush()
    return done
