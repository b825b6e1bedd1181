"""Which tensors a checkpoint holds, and where: names, shapes and file offsets. Reads no pickle,
ever.

Headers are parsed here, so that a damaged shard is found before anything is allocated. A folder
that stands for GGUF files (`gguf/folder.py`) has their tensors, by the same names.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ds_runtime.checkpoint.base import base_of
from ds_runtime.checkpoint.files import HEADER, LISTS, open_plain, read_bytes
from ds_runtime.checkpoint.gguf.folder import LINK, linked_tensors
from ds_runtime.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EXPORTED = "nextn_layer_parameters.safetensors"  # a draft layer that was exported alone
_MALFORMED = (  # what reading a hostile JSON header can raise; 1e400 overflows, depth recurses
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}


class Sized(Protocol):
    """What goes into one file as a whole."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        ...


S = TypeVar("S", bound=Sized)


def in_shards(items: Iterable[S], limit: int) -> dict[str, list[S]]:
    """Consecutive items by the names of the files that they go into: of at most `limit` bytes, or
    one item alone."""
    groups: list[list[S]] = [[]]
    used = 0
    for item in items:
        if groups[-1] and used + item.nbytes > limit:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += item.nbytes
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}.safetensors": group for i, group in enumerate(groups, 1)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a shard. dtype as safetensors names it, or a type of GGUF's that stores blocks
    of elements; begin and end are file offsets.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin


def tensors_of(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint folder and of its base, by name, checked against the files' true
    lengths. Raises CheckpointError for what is missing or damaged."""
    found = _own(folder)
    return found if (base := base_of(folder)) is None else {**tensors_of(base), **found}


def _own(folder: Path) -> dict[str, StoredTensor]:
    if (folder / LINK).is_file():
        return {
            n: StoredTensor(t.file, t.type.name, t.shape, t.begin, t.begin + t.nbytes)
            for n, t in linked_tensors(folder / LINK).items()
        }
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    for name in (SINGLE, EXPORTED):
        if (folder / name).is_file():
            return read_header(folder / name)
    raise CheckpointError(_nothing_here(folder))


def _indexed(index: Path) -> dict[str, StoredTensor]:
    folder = index.parent
    try:
        where: dict[str, str] = json.loads(read_bytes(index, LISTS))["weight_map"]
        files = sorted({str(name) for name in where.values()})
    except _MALFORMED as e:
        raise CheckpointError(
            f"{index}: not a safetensors index with a weight_map "
            f"({type(e).__name__}: {e}); download the file again"
        ) from e
    shards = {}
    for name in files:
        path = folder / name
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(f"{index}: weight_map names {name!r}, not a plain file name")
        if not path.is_file():
            have = sum((folder / f).is_file() for f in files)
            raise CheckpointError(
                f"{path}: missing; the index names {len(files)} shards and {have} are here: "
                "download the missing ones"
            )
        shards[name] = read_header(path)
    for tensor, name in where.items():
        if tensor not in shards[name]:
            raise CheckpointError(
                f"{folder / name}: holds no tensor {tensor!r}, although the index says "
                "so; index and shards are of different checkpoints: download both again"
            )
    return {tensor: shards[name][tensor] for tensor, name in where.items()}


def _nothing_here(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        return (
            f"{folder}: holds only pickled weights ({pickles[0]}, …), which can run code when "
            "loaded; convert them to safetensors"
        )
    loose = sorted(p.name for p in folder.glob("*.safetensors"))
    if loose:
        return (
            f"{folder}: holds {loose[0]} but no {INDEX}; download the index, or name a single "
            f"file {SINGLE}"
        )
    return f"{folder}: neither {INDEX} nor {SINGLE} is there; is the download complete?"


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one shard, after checking that the file is as long as its header says."""
    size = path.stat().st_size
    with open_plain(path) as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(HEADER, size - 8):
            raise CheckpointError(
                f"{path}: {size} bytes, but its header alone should take {length + 8}; the file is "
                "truncated or no safetensors file: download it again"
            )
        try:
            header = json.loads(file.read(length))
            entries = {
                name: _entry(path, 8 + length, fields)
                for name, fields in header.items()
                if name != "__metadata__"
            }
        except _MALFORMED as e:
            raise CheckpointError(
                f"{path}: its safetensors header cannot be read ({type(e).__name__}: {e}); "
                "download it again"
            ) from e
    expected = max((e.end for e in entries.values()), default=8 + length)
    if size != expected:
        raise CheckpointError(
            f"{path}: {size} bytes found, {expected} expected from its header; download it again"
        )
    in_order = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    for (name, entry), (after, other) in pairwise(in_order):
        if other.begin < entry.end:
            raise CheckpointError(
                f"{path}: {name} ends at byte {entry.end} and {after} begins at byte "
                f"{other.begin}; the file is damaged: download it again"
            )
    return entries


def _entry(path: Path, base: int, fields: Mapping[str, Any]) -> StoredTensor:
    dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
    begin, end = (int(n) for n in fields["data_offsets"])
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown")
    if begin < 0 or min(shape, default=0) < 0 or end - begin != _size(dtype, shape):
        raise ValueError(f"shape {list(shape)} of {dtype} does not take {end - begin} bytes")
    return StoredTensor(path, dtype, shape, base + begin, base + end)


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize
