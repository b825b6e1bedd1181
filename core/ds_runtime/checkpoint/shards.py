"""A folder of safetensors shards: names, shapes, and parts of tensors. Reads no pickle, ever.

A folder that stands for GGUF files (`gguf/folder.py`) has their tensors, by the same names.

Headers are parsed here, so that a damaged shard is found before anything is allocated. Parts are
read with plain reads, into fresh memory or on their way to a device: nothing of a file stays
mapped, so the process holds exactly what the caller keeps.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_runtime.checkpoint.base import base_of
from ds_runtime.checkpoint.files import HEADER, LISTS, open_plain, read_bytes
from ds_runtime.checkpoint.gguf.blocks import BLOCKS, values
from ds_runtime.checkpoint.gguf.folder import LINK, linked_tensors
from ds_runtime.checkpoint.nan import KINDS, PIECE, Bytes, any_nan, first_nan
from ds_runtime.checkpoint.staging import Staging, shares_memory
from ds_runtime.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EXPORTED = "nextn_layer_parameters.safetensors"  # a draft layer that was exported alone
_STRIP = 8 << 20  # bytes read at a time where only some columns are wanted
_MALFORMED = (  # what reading a hostile JSON header can raise; 1e400 overflows, depth recurses
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
_READERS = 16  # threads at most, and at least so many bytes for each
_SHARE = 1 << 20
_LARGE = 32 << 20  # bytes from which memory always comes from the system
_READ = 1 << 30  # bytes per system call; Linux moves at most 2 GiB at once
_GAP = 4 << 10  # bytes between two tensors that are rather read than skipped
_SMALL = 64 << 10  # bytes of a tensor that is kept for the host, too: scales are looked at there
_ASKED = 64 << 20  # bytes that a device looks at together: so many bytes of answers are there
_ALIGN = 16  # bytes; what begins elsewhere in memory is not what every kernel takes

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


@dataclass(frozen=True, slots=True)
class _Span(StoredTensor):
    """Bytes of a shard that are not read as one tensor: NaN is looked for in these `parts`."""

    parts: tuple[StoredTensor, ...] = ()

    @staticmethod
    def of(entry: StoredTensor, parts: tuple[StoredTensor, ...]) -> _Span:
        """The bytes of an entry."""
        return _Span(entry.file, entry.dtype, entry.shape, entry.begin, entry.end, parts)


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes [begin, end) of a shard, in memory already."""

    file: Path
    begin: int
    end: int
    held: Tensor

    def part(self, entry: StoredTensor, begin: int, size: int) -> Tensor | None:
        """`size` of its bytes from file offset `begin`, if it has them where they may begin."""
        inside = entry.file == self.file and self.begin <= begin and begin + size <= self.end
        at = begin - self.begin
        return self.held[at : at + size] if inside and at % _ALIGN == 0 else None

    def copy(self, begin: int, room: Tensor) -> None:
        """What it shall hold of `room`, the shard's bytes from file offset `begin` on. Through the
        buffers alone: calls of torch hand the interpreter's lock to other threads."""
        first, last = max(begin, self.begin), min(begin + room.shape[0], self.end)
        if first < last:
            mine, other = self.held.numpy().data, room.numpy().data
            mine[first - self.begin : last - self.begin] = other[first - begin : last - begin]


class Checkpoint:
    """All tensors of a checkpoint folder and of its base, checked against the files' true lengths.

    `entries`: those of other files than a checkpoint's, from `read_header`. `on_read`, if set, is
    called with the number of bytes of each read, by one thread at a time. Several may read.
    `allow_nan`: False refuses NaN wherever it is read, True even in scales; None: those alone are
    looked at.
    """

    def __init__(
        self,
        folder: Path,
        entries: dict[str, StoredTensor] | None = None,
        allow_nan: bool | None = None,
    ) -> None:
        self.folder = folder
        self.allow_nan = allow_nan
        self.entries: dict[str, StoredTensor] = entries or {}
        self.on_read: Callable[[int], None] | None = None
        self._asked: list[tuple[list[_Place], Tensor]] = []  # is there NaN in these?
        self._files: dict[Path, int] = {}  # open descriptors
        self._readers: ThreadPoolExecutor | None = None
        self._own = threading.local()  # of each thread that reads
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._files)
        if entries is not None:
            return
        self._open(folder)
        if (base := base_of(folder)) is not None:
            self.entries = {**Checkpoint(base).entries, **self.entries}

    def _open(self, folder: Path) -> None:
        index = folder / INDEX
        if (folder / LINK).is_file():
            found = linked_tensors(folder / LINK)
            self.entries = {
                n: StoredTensor(t.file, t.type.name, t.shape, t.begin, t.begin + t.nbytes)
                for n, t in found.items()
            }
        elif index.exists():
            self._open_index(index)
        else:
            for name in (SINGLE, EXPORTED):
                if (folder / name).is_file():
                    self.entries = read_header(folder / name)
                    return
            raise CheckpointError(_nothing_here(folder))

    def _open_index(self, index: Path) -> None:
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
            path = self.folder / name
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise CheckpointError(f"{index}: weight_map names {name!r}, not a plain file name")
            if not path.is_file():
                have = sum((self.folder / f).is_file() for f in files)
                raise CheckpointError(
                    f"{path}: missing; the index names {len(files)} shards and {have} are here: "
                    "download the missing ones"
                )
            shards[name] = read_header(path)
        for tensor, name in where.items():
            if tensor not in shards[name]:
                raise CheckpointError(
                    f"{self.folder / name}: holds no tensor {tensor!r}, although the index says "
                    "so; index and shards are of different checkpoints: download both again"
                )
            self.entries[tensor] = shards[name][tensor]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def names(self) -> list[str]:
        """All tensor names."""
        return list(self.entries)

    def entry(self, name: str) -> StoredTensor:
        """Shape, dtype and place of one tensor; CheckpointError if there is none."""
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: no tensor {name!r}") from None

    def read(
        self,
        name: str,
        rows: slice | None = None,
        cols: slice | None = None,
        index: int | None = None,
        device: torch.device | str = "cpu",
        looks: bool = True,
    ) -> Tensor:
        """A tensor with these rows (first dimension) and columns (last) of one in the files.

        `index` first picks one matrix of a stack [n, rows, cols]. Slices are within the shape and
        without a step. Reads from the file only what is asked, strip by strip for columns. Blocks
        become float32. On a device that computes beside the host, what is queued there later finds
        it complete. looks: for NaN, where it is not allowed; else the caller does.
        """
        entry = self.entry(name)
        if entry.dtype in BLOCKS:
            assert index is None, name
            found = values(entry.dtype, self.row_bytes(name, rows, device))
            found = found.view(-1, *entry.shape[1:])
            if not bool((good := self.is_good(found)).all()):
                at = [int(i[0]) for i in (~good).nonzero(as_tuple=True)]
                raise CheckpointError(
                    f"{entry.file}: {name}: a scale of its {entry.dtype} blocks is no finite "
                    f"number, that of element {at} of the part read; {self.remedy}"
                )
            return found if cols is None else found[..., cols].contiguous()
        dtype = DTYPES[entry.dtype]
        shape, begin = entry.shape, entry.begin
        if index is not None:
            shape = shape[1:]
            begin += index * math.prod(shape) * dtype.itemsize
        if not shape:
            return self._bytes(entry, begin, dtype.itemsize, device, looks).view(dtype).reshape(())
        r0, r1 = _bounds(rows, shape[0])
        size = math.prod(shape[1:]) * dtype.itemsize  # of a row
        if cols is None or len(shape) == 1:
            data = self._bytes(entry, begin + r0 * size, (r1 - r0) * size, device, looks)
            return data.view(dtype).reshape(r1 - r0, *shape[1:])
        assert len(shape) == 2, f"{name}: columns of a {len(shape)}-dimensional tensor"
        c0, c1 = _bounds(cols, shape[1])
        out = torch.empty(r1 - r0, c1 - c0, dtype=dtype, device=device)
        step = max(1, _STRIP // max(1, size))
        for row in range(r0, r1, step):
            last = min(r1, row + step)
            data = self._bytes(entry, begin + row * size, (last - row) * size, device, looks)
            # Bytes are copied as bytes: not every dtype has a copy kernel on every device.
            part = data.view(last - row, size)[:, c0 * dtype.itemsize : c1 * dtype.itemsize]
            out.view(torch.uint8)[row - r0 : last - r0] = part
        return out

    def row_bytes(
        self, name: str, rows: slice | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The bytes of rows (first dimension) of a tensor that is stored in blocks along the last:
        [rows · matrices, bytes of a row] uint8."""
        entry = self.entry(name)
        r0, r1 = _bounds(rows, entry.shape[0])
        each = entry.nbytes // max(1, entry.shape[0])
        data = self._bytes(entry, entry.begin + r0 * each, (r1 - r0) * each, device)
        kind = BLOCKS[entry.dtype]
        return data.view(-1, entry.shape[-1] // kind.elements * kind.nbytes)

    def is_good(self, numbers: Tensor) -> Tensor:
        """Which of these scales, or of what was made with them, may stand there."""
        return ~torch.isinf(numbers) if self.allow_nan else torch.isfinite(numbers)

    @property
    def remedy(self) -> str:
        """What to do about NaN."""
        said = "the file is damaged: download it again"
        return said if self.allow_nan is None else f"{said}, or load it with --allow-nan-weights"

    def sent(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """A tensor of the host on a device, without waiting for what is queued there."""
        if shares_memory(device):
            return tensor.to(device)
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        out = torch.empty(data.shape[0], dtype=torch.uint8, device=device)
        ring = self._ring(device)
        for at in range(0, data.shape[0], ring.most):
            part = data[at : at + ring.most]
            ring.send(ring.room(part.shape[0]).copy_(part), out[at : at + part.shape[0]])
        return out.view(tensor.dtype).view(tensor.shape)

    def _bytes(
        self,
        entry: StoredTensor,
        begin: int,
        size: int,
        device: torch.device | str = "cpu",
        looks: bool = True,
    ) -> Tensor:
        """`size` bytes of a shard from file offset `begin`, as uint8: a new tensor, or a part of
        what was read `together`."""
        here = shares_memory(device)
        runs: list[_Run] = getattr(self._own, "here" if here else "there", [])
        out = next((p for run in runs if (p := run.part(entry, begin, size)) is not None), None)
        if out is None and here:
            out = _room(size)
            self._fill(entry if looks else _Span.of(entry, ()), begin, out)
        elif out is None:
            out = self._fetched(entry if looks else _Span.of(entry, ()), begin, size, device)
        if self.on_read is not None:
            with self._lock:
                self.on_read(size)
        return out

    def _fetched(
        self,
        entry: StoredTensor,
        begin: int,
        size: int,
        device: torch.device | str,
        beside: Sequence[_Run] = (),
    ) -> Tensor:
        """The same on a device that computes beside the host, always new; `beside` it, what these
        shall hold of the bytes here."""
        out, ring = torch.empty(size, dtype=torch.uint8, device=device), self._ring(device)
        for at in range(0, size, ring.most):
            room = ring.room(min(size - at, ring.most))
            self._fill(_Span.of(entry, ()), begin + at, room)
            for run in beside:
                run.copy(begin + at, room)
            ring.send(room, out[at : at + room.shape[0]])
        self._ask(entry, begin, out)
        return out

    def _ask(self, entry: StoredTensor, begin: int, sent: Tensor) -> None:
        """Have the device look for NaN in what it was sent, from file offset `begin` on: together
        in what is of one dtype, since calls of the device cost more than looking."""
        parts = entry.parts if isinstance(entry, _Span) else (entry,)
        places: dict[str, list[_Place]] = {}
        for e in parts if self.allow_nan is False else ():
            if (piece := _whole(e, begin, sent.shape[0])) is not None:
                cut = range(piece[0], piece[1], _ASKED)
                own = (_Place(e, at, min(at + _ASKED, piece[1])) for at in cut)
                places.setdefault(e.dtype, []).extend(own)
        for dtype, several in places.items():
            for group in _groups(several):
                found = any_nan(dtype, _joined(sent, begin, group))
                with self._lock:
                    self._asked.append((group, found))

    def finish(self) -> None:
        """CheckpointError for a NaN in what was sent to a device since the last call, which waits
        for the device."""
        asked, self._asked = (
            sorted(self._asked, key=lambda a: (a[0][0].entry.file, a[0][0].first)),
            [],
        )
        found = torch.stack([a[1] for a in asked]).tolist() if asked else []
        for (group, _), nan in zip(asked, found, strict=True):
            for e, first, last in group if nan else ():  # read it again, to say where
                room = _room(last - first)
                self._fill(_Span.of(e, ()), first, room)
                self._look((e,), first, room.numpy())
            if nan:
                name = next(n for n, other in self.entries.items() if other == group[0].entry)
                more = f" or one of {len(group) - 1} behind it" if len(group) > 1 else ""
                raise CheckpointError(
                    f"{group[0].entry.file}: {name}{more}: is NaN on the device and not in the "
                    "file: the copy to the device or the device is at fault; try again, or another "
                    "device"
                )

    @contextmanager
    def together(self, names: Iterable[str], device: torch.device | str) -> Iterator[None]:
        """What this thread reads of these tensors for a device that computes beside the host comes
        out of as few reads as their places allow, and what it reads of the small ones for the host
        as well; for tensors that it wants all of."""
        entries = sorted(map(self.entry, names), key=lambda e: (e.file, e.begin))
        spans: list[StoredTensor] = []
        for entry in entries:
            last = spans[-1] if spans else None
            if last and last.file == entry.file and entry.begin - last.end <= _GAP:
                spans[-1] = replace(last, end=max(last.end, entry.end))
            else:
                spans.append(entry)
        small = [e for e in entries if e.nbytes <= _SMALL]
        here = [_Run(e.file, e.begin, e.end, _room(e.nbytes)) for e in small]
        there = []
        for e in spans:
            beside = [run for run in here if run.file == e.file]
            own = (x for x in entries if x.file == e.file and e.begin <= x.begin < e.end)
            held = self._fetched(_Span.of(e, tuple(own)), e.begin, e.nbytes, device, beside)
            there.append(_Run(e.file, e.begin, e.end, held))
        for e, run in zip(small, here, strict=True):  # also of such as begin where none is read
            self._look((e,), e.begin, run.held.numpy())
        self._own.here, self._own.there = here, there
        try:
            yield
        finally:
            self._own.here, self._own.there = [], []

    def _fill(self, entry: StoredTensor, begin: int, room: Tensor) -> None:
        """Read a shard's bytes from file offset `begin` on into all of `room`, by several
        threads, which look for NaN in what they have read."""
        size, held = room.shape[0], room.numpy()
        looks = entry.parts if isinstance(entry, _Span) else (entry,)
        own = [e for e in looks if e.dtype in KINDS] if self.allow_nan is False else []
        with self._lock:
            file = self._files.get(entry.file)
            if file is None:
                file = self._files[entry.file] = os.open(entry.file, os.O_RDONLY)
            pool = self._pool()
        most = 1 if getattr(self._own, "undivided", False) else _READERS
        count = max(1, min(torch.get_num_threads(), most, size // _SHARE))
        edges = [*(size * i // count // _ALIGN * _ALIGN for i in range(count)), size]
        parts = [(held[a:b], begin + a, own) for a, b in pairwise(edges)]
        others = [pool.submit(self._fill_part, file, entry.file, *part) for part in parts[1:]]
        try:
            self._fill_part(file, entry.file, *parts[0])
        finally:
            wait(others)
        for other in others:
            other.result()

    def _fill_part(
        self, file: int, name: Path, held: Bytes, begin: int, looks: Sequence[StoredTensor]
    ) -> None:
        """All of `held` from an offset of an open file, in pieces that are looked at."""
        step = PIECE if looks else len(held) or 1
        for at in range(0, len(held), step):
            piece = held[at : at + step]
            _fill(file, name, memoryview(piece.data), begin + at)
            self._look(looks, begin + at, piece)

    def _look(self, entries: Iterable[StoredTensor], begin: int, held: Bytes) -> None:
        """CheckpointError for a NaN of these tensors in what was read from file offset `begin`."""
        if self.allow_nan is not False:
            return
        for e in entries:
            if (piece := _whole(e, begin, len(held))) is None:
                continue
            (first, last), kind = piece, KINDS[e.dtype]
            found = first_nan(kind, held[first - begin : last - begin])
            if found is not None:
                name = next(n for n, other in self.entries.items() if other == e)
                at = np.unravel_index((first - e.begin) // kind.size + found, e.shape)
                said = [int(i) for i in at]
                raise CheckpointError(f"{e.file}: {name}: element {said} is NaN; {self.remedy}")

    def undivided(self) -> None:
        """The calling thread reads alone from now on: there are enough that do."""
        self._own.undivided = True

    def _ring(self, device: torch.device | str) -> Staging:
        """This thread's, before the one device that the checkpoint is read for."""
        ring: Staging | None = getattr(self._own, "ring", None)
        if ring is None or ring.device != torch.device(device):
            ring = self._own.ring = Staging(torch.device(device))
        return ring

    def _pool(self) -> ThreadPoolExecutor:
        """Threads that read beside the caller: one copies from the page cache slower than memory
        allows."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READERS - 1, "checkpoint")
        return self._readers

    def close(self) -> None:
        """Close the shards; reading opens them again."""
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None
        self._own = threading.local()
        _close(self._files)


def _whole(entry: StoredTensor, begin: int, size: int) -> tuple[int, int] | None:
    """Which file offsets, of `size` from `begin` on, hold whole elements of a tensor that may be
    NaN. Elements that are cut are read again, by themselves."""
    first, last = max(begin, entry.begin), min(begin + size, entry.end)
    kind = KINDS.get(entry.dtype)
    if kind is None:
        return None
    first += (entry.begin - first) % kind.size
    last -= (last - entry.begin) % kind.size
    return (first, last) if first < last else None


class _Place(NamedTuple):
    """Whole elements of a tensor, by file offsets."""

    entry: StoredTensor
    first: int
    last: int


def _groups(places: Sequence[_Place]) -> Iterator[list[_Place]]:
    """As many as have `_ASKED` bytes, in their order."""
    group, size = list[_Place](), 0
    for place in places:
        if group and size + place.last - place.first > _ASKED:
            yield group
            group, size = [], 0
        group.append(place)
        size += place.last - place.first
    if group:
        yield group


def _joined(sent: Tensor, begin: int, group: Sequence[_Place]) -> Tensor:
    """Their bytes out of those from file offset `begin` on: a view where they touch."""
    first, last = group[0].first, group[-1].last
    if sum(place.last - place.first for place in group) == last - first:
        return sent[first - begin : last - begin]
    return torch.cat([sent[place.first - begin : place.last - begin] for place in group])


def _room(size: int) -> Tensor:
    """New memory for bytes. For large tensors the system is asked for large pages: thousands of
    small ones cost more than reading into them."""
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    room = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a wish: a kernel without them refuses
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=torch.uint8)


def _fill(file: int, name: Path, view: memoryview, begin: int) -> None:
    """Read from an offset of an open file until the view is full."""
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done : done + _READ]], begin + done)
        if got == 0:
            raise CheckpointError(
                f"{name}: became shorter while it was read ({done} of {len(view)} bytes at "
                f"{begin}); restore the file and start again"
            )
        done += got


def _close(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _bounds(part: slice | None, size: int) -> tuple[int, int]:
    if part is None:
        return 0, size
    assert part.step in (None, 1) and 0 <= part.start <= part.stop <= size, (part, size)
    return part.start, part.stop


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
