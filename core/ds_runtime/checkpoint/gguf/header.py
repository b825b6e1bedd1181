"""The header of a GGUF file: keys with values, and where which tensor lies. Torch-free.

Little-endian, versions 2 and 3: magic, version, number of tensors, number of keys; then the keys,
the tensors, and, aligned, the data.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_runtime.errors import CheckpointError, UnsupportedError

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMS = 4


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a tensor type stores elements: `elements` in `nbytes`."""

    name: str
    elements: int
    nbytes: int


TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    6: BlockType("Q5_0", 32, 22),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
_REFUSED = {3: "Q4_1", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS"}
_REFUSED |= {17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"}
_REFUSED |= {23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: shape with the contiguous dimension last; begin is an offset in the file."""

    file: Path
    type: BlockType
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.elements * self.type.nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """A file's keys and tensors."""

    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> Header:
    """Parse and check one file. CheckpointError if it is damaged, UnsupportedError for tensor types
    that are not read."""
    data = path.open("rb")
    with data:
        size = path.stat().st_size
        cursor = _Cursor(data.read, path, size)
        if cursor.take(4) != _MAGIC:
            raise CheckpointError(f"{path}: is no GGUF file; give a folder or a .gguf file")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise UnsupportedError(
                f"{path}: GGUF version {version} is not supported; expected 2 or 3, little-endian"
            )
        tensors, keys = cursor.number("Q"), cursor.number("Q")
        cursor.fits(tensors + keys, "tensors and keys")
        values = {}
        for _ in range(keys):
            key = cursor.text()
            values[key] = cursor.value(cursor.number("I"))
        infos = [cursor.tensor() for _ in range(tensors)]
    alignment = values.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"general.alignment {alignment!r}")
    base = -(-cursor.done // alignment) * alignment
    found = {}
    for name, shape, kind, offset in infos:
        tensor = GgufTensor(path, _type(path, name, kind), shape, base + offset)
        if shape[-1] % tensor.type.elements:
            raise cursor.damaged(f"{name}: {shape[-1]} columns of {tensor.type.name}")
        if tensor.begin + tensor.nbytes > size:
            raise CheckpointError(
                f"{path}: {size} bytes found, {name} ends at {tensor.begin + tensor.nbytes}; the "
                "file is truncated: download it again"
            )
        found[name] = tensor
    return Header(values, found)


def _type(path: Path, name: str, kind: int) -> BlockType:
    if kind not in TYPES:
        said = _REFUSED.get(kind, f"number {kind}")
        known = ", ".join(t.name for t in TYPES.values())
        raise UnsupportedError(
            f"{path}: {name} is of type {said}, which is not supported; supported: {known}"
        )
    return TYPES[kind]


class _Cursor:
    """Reads forward, never beyond the file."""

    def __init__(self, read: Callable[[int], bytes], path: Path, size: int) -> None:
        self._read, self._path, self._size = read, path, size
        self.done = 0

    def damaged(self, what: str) -> CheckpointError:
        """The error for what cannot be."""
        return CheckpointError(
            f"{self._path}: its header cannot be read ({what}); the file is damaged or truncated: "
            "download it again"
        )

    def fits(self, count: int, what: str) -> None:
        """CheckpointError unless the rest of the file could hold so many of at least a byte."""
        if count > self._size - self.done:
            raise self.damaged(f"{count} {what} at byte {self.done} of {self._size}")

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self.fits(count, "bytes")
        data = self._read(count)
        if len(data) < count:
            raise self.damaged(f"{count} bytes at byte {self.done}")
        self.done += count
        return data

    def number(self, code: str) -> Any:
        """One number of a struct code."""
        form = struct.Struct(f"<{code}")
        return form.unpack(self.take(form.size))[0]

    def text(self) -> str:
        """A string with its length ahead."""
        raw = self.take(self.number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as e:
            raise self.damaged(f"no UTF-8 at byte {self.done}") from e

    def value(self, kind: int) -> Any:
        """A value of a type number: a number, a string, or a list of them."""
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"value type {kind}")
        inner, count = self.number("I"), self.number("Q")
        self.fits(count, "values")
        if inner == _STRING:
            return [self.text() for _ in range(count)]
        if inner not in _NUMBERS:
            raise self.damaged(f"lists of value type {inner}")
        form = struct.Struct(f"<{count}{_NUMBERS[inner]}")
        return list(form.unpack(self.take(form.size)))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, type number, offset in the data)."""
        name, dims = self.text(), self.number("I")
        if not 1 <= dims <= _MOST_DIMS:
            raise self.damaged(f"{name}: {dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(dims))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        return name, shape, kind, offset
