"""What a conversion writes: every tensor, its shard and the shard's header, before any is read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_runtime.checkpoint.tensors import DTYPES, StoredTensor, in_shards
from ds_runtime.ops.contract import Encoding
from ds_runtime.weights.quant import Place, Quant
from ds_runtime_convert.packing import planned


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor of the output."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Item:
    """What is written at once: a Linear [out, in] of some encoding, or, where there is none, a
    tensor that is copied, perhaps in another float dtype. components: name → tensor.
    """

    module: str
    components: dict[str, Written]
    shape: tuple[int, int] = (0, 0)
    encoding: Encoding | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.components.values())

    def place(self) -> Place:
        """Where the output holds this Linear."""
        return Place({c: t.name for c, t in self.components.items()}, self.shape)


def linear(module: str, quant: Quant, shape: tuple[int, int], dense: str, scale: str) -> Item:
    """A Linear as the output's quant stores it; dense: the dtype of one that is not quantised."""
    encoding = quant.encoding(module)
    if encoding.format == "dense":
        weight = Written(f"{module}.weight", dense, shape)
        return Item(module, {"weight": weight}, shape, encoding)
    made = planned(encoding, shape, scale)
    names = {c: f"{module}.{encoding.tensors[c]}" for c in made}
    return Item(module, {c: Written(names[c], *made[c]) for c in made}, shape, encoding)


def copied(name: str, dtype: str, shape: tuple[int, ...]) -> Item:
    """A tensor under its own name."""
    return Item("", {"weight": Written(name, dtype, shape)})


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file: its items in order, and the bytes before the first tensor."""

    name: str
    items: tuple[Item, ...]
    header: bytes

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(item.nbytes for item in self.items)

    def entries(self, file: Path) -> Mapping[str, StoredTensor]:
        """The tensors where they lie in `file`."""
        at, found = len(self.header), {}
        for item in self.items:
            for t in item.components.values():
                found[t.name] = StoredTensor(file, t.dtype, t.shape, at, at + t.nbytes)
                at += t.nbytes
        return found

    def ends(self) -> Iterator[int]:
        """The file's length after each item."""
        at = len(self.header)
        for item in self.items:
            at += item.nbytes
            yield at


def shards(items: Sequence[Item], shard_bytes: int, about: dict[str, str]) -> list[ShardPlan]:
    """The items in files of at most this many bytes, unless one alone is larger. about: what the
    headers say of the conversion, which resuming compares."""
    return [
        ShardPlan(name, tuple(group), _header(tuple(group), about))
        for name, group in in_shards(items, shard_bytes).items()
    ]


def _header(items: tuple[Item, ...], about: dict[str, str]) -> bytes:
    """The length and the JSON of a safetensors file, filled up to eight bytes."""
    said: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    at = 0
    for item in items:
        for t in item.components.values():
            said[t.name] = {
                "dtype": t.dtype,
                "shape": list(t.shape),
                "data_offsets": [at, at + t.nbytes],
            }
            at += t.nbytes
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def fingerprint(entries: Mapping[str, StoredTensor], quantization: object) -> str:
    """What a source is: its tensors, and its files' sizes and times."""
    files = sorted({e.file for e in entries.values()})
    stats = [(f.name, s.st_size, s.st_mtime_ns) for f in files if (s := f.stat())]
    tensors = sorted((n, e.dtype, e.shape, e.begin) for n, e in entries.items())
    said = json.dumps([stats, tensors, quantization], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:16]
