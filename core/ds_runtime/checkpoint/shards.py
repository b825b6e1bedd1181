"""A checkpoint's tensors, whole or in parts: into fresh memory, or on their way to a device."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_runtime.checkpoint.gguf.blocks import BLOCKS, values
from ds_runtime.checkpoint.nan_looks import NanLooks
from ds_runtime.checkpoint.reads import ALIGN, Files, new_room
from ds_runtime.checkpoint.staging import Staging, shares_memory
from ds_runtime.checkpoint.tensors import DTYPES, StoredTensor, tensors_of
from ds_runtime.errors import CheckpointError

_STRIP = 8 << 20  # bytes read at a time where only some columns are wanted
_GAP = 4 << 10  # bytes between two tensors that are rather read than skipped
_SMALL = 64 << 10  # bytes of a tensor that is kept for the host, too: scales are looked at there


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
        return self.held[at : at + size] if inside and at % ALIGN == 0 else None

    def copy(self, begin: int, room: Tensor) -> None:
        """What it shall hold of `room`, the shard's bytes from file offset `begin` on. Through the
        buffers alone: calls of torch hand the interpreter's lock to other threads."""
        first, last = max(begin, self.begin), min(begin + room.shape[0], self.end)
        if first < last:
            mine, other = self.held.numpy().data, room.numpy().data
            mine[first - self.begin : last - self.begin] = other[first - begin : last - begin]


class Checkpoint:
    """All tensors of a checkpoint folder and of its base.

    `entries`: those of other files than a checkpoint's, from `read_header`. `on_read`, if set, is
    called with the number of bytes of each read, by one thread at a time. Several may read.
    `allow_nan`: as of `NanLooks`, which is `nan`.
    """

    def __init__(
        self,
        folder: Path,
        entries: Mapping[str, StoredTensor] | None = None,
        allow_nan: bool | None = None,
    ) -> None:
        self.folder = folder
        self.entries = tensors_of(folder) if entries is None else entries
        self.nan = NanLooks(self.entries, allow_nan)
        self.files = Files()
        self.on_read: Callable[[int], None] | None = None
        self._own = threading.local()  # of each thread that reads
        self._lock = threading.Lock()

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
        become float32. On a device that computes in parallel with the host, what is queued there
        later finds it complete. looks: for NaN, where it is not allowed; else the caller does.
        """
        entry = self.entry(name)
        if entry.dtype in BLOCKS:
            assert index is None, name
            found = values(entry.dtype, self.row_bytes(name, rows, device))
            found = found.view(-1, *entry.shape[1:])
            if not bool((good := self.nan.is_good(found)).all()):
                at = [int(i[0]) for i in (~good).nonzero(as_tuple=True)]
                raise CheckpointError(
                    f"{entry.file}: {name}: a scale of its {entry.dtype} blocks is no finite "
                    f"number, that of element {at} of the part read; {self.nan.remedy}"
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
        here, looked = shares_memory(device), (entry,) if looks else ()
        runs: list[_Run] = getattr(self._own, "here" if here else "there", [])
        out = next((p for run in runs if (p := run.part(entry, begin, size)) is not None), None)
        if out is None and here:
            out = new_room(size)
            self.files.fill(entry.file, begin, out, self.nan.at(looked))
        elif out is None:
            out = self._fetched(entry.file, begin, size, device, looked)
        if self.on_read is not None:
            with self._lock:
                self.on_read(size)
        return out

    def _fetched(
        self,
        file: Path,
        begin: int,
        size: int,
        device: torch.device | str,
        looked: Sequence[StoredTensor],
        beside: Sequence[_Run] = (),
    ) -> Tensor:
        """The same on a device that computes beside the host, always new. looked: tensors in which
        the device looks for NaN. beside: what shall hold of the bytes here."""
        out, ring = torch.empty(size, dtype=torch.uint8, device=device), self._ring(device)
        for at in range(0, size, ring.most):
            room = ring.room(min(size - at, ring.most))
            self.files.fill(file, begin + at, room)
            for run in beside:
                run.copy(begin + at, room)
            ring.send(room, out[at : at + room.shape[0]])
        self.nan.ask(looked, begin, out)
        return out

    def finish(self) -> None:
        """CheckpointError for a NaN in what was sent to a device since the last call, which waits
        for the device."""
        self.nan.finish(self.files.fill)

    @contextmanager
    def together(self, names: Iterable[str], device: torch.device | str) -> Iterator[None]:
        """What this thread reads of these tensors for a device that computes in parallel with the
        host comes out of as few reads as their places allow. So does what it reads of the small
        ones for the host. For tensors that it wants all of."""
        entries = sorted(map(self.entry, names), key=lambda e: (e.file, e.begin))
        spans: list[list[StoredTensor]] = []
        for entry in entries:
            last = spans[-1] if spans else [entry]
            gap = entry.begin - max(e.end for e in last)
            if spans and last[0].file == entry.file and gap <= _GAP:
                last.append(entry)
            else:
                spans.append([entry])
        small = [e for e in entries if e.nbytes <= _SMALL]
        here = [_Run(e.file, e.begin, e.end, new_room(e.nbytes)) for e in small]
        there = []
        for span in spans:
            file, begin, end = span[0].file, span[0].begin, max(e.end for e in span)
            beside = [run for run in here if run.file == file]
            held = self._fetched(file, begin, end - begin, device, span, beside)
            there.append(_Run(file, begin, end, held))
        for e, run in zip(small, here, strict=True):  # also of such as begin where none is read
            if (look := self.nan.at((e,))) is not None:
                look(e.begin, run.held.numpy())
        self._own.here, self._own.there = here, there
        try:
            yield
        finally:
            self._own.here, self._own.there = [], []

    def _ring(self, device: torch.device | str) -> Staging:
        """This thread's, before the one device that the checkpoint is read for."""
        ring: Staging | None = getattr(self._own, "ring", None)
        if ring is None or ring.device != torch.device(device):
            ring = self._own.ring = Staging(torch.device(device))
        return ring

    def close(self) -> None:
        """Close the shards; reading opens them again."""
        self.files.close()
        self._own = threading.local()


def _bounds(part: slice | None, size: int) -> tuple[int, int]:
    if part is None:
        return 0, size
    assert part.step in (None, 1) and 0 <= part.start <= part.stop <= size, (part, size)
    return part.start, part.stop
