"""Whether there is NaN in what was read of a checkpoint, where the user does not allow it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_runtime.checkpoint.nan import KINDS, Bytes, any_nan, first_nan
from ds_runtime.checkpoint.reads import new_room
from ds_runtime.checkpoint.tensors import StoredTensor
from ds_runtime.errors import CheckpointError

_ASKED = 64 << 20  # bytes that a device looks at together: so many bytes of answers are there


class NanLooks:
    """entries: of the checkpoint. allow: False refuses NaN wherever it is read, True even in
    scales; None: those alone are looked at."""

    def __init__(self, entries: Mapping[str, StoredTensor], allow: bool | None) -> None:
        self.allow = allow
        self._entries = entries
        self._asked: list[tuple[list[_Place], Tensor]] = []  # is there NaN in these?
        self._lock = threading.Lock()

    @property
    def remedy(self) -> str:
        """What to do about NaN."""
        said = "the file is damaged: download it again"
        return said if self.allow is None else f"{said}, or load it with --allow-nan-weights"

    def is_good(self, numbers: Tensor) -> Tensor:
        """Which of these scales, or of what was made with them, may be there."""
        return ~torch.isinf(numbers) if self.allow else torch.isfinite(numbers)

    def at(self, entries: Sequence[StoredTensor]) -> Callable[[int, Bytes], None] | None:
        """What looks at bytes from a file offset for NaN of these tensors; None: nobody need."""
        own = [e for e in entries if e.dtype in KINDS] if self.allow is False else []
        return partial(self._look, own) if own else None

    def _look(self, entries: Sequence[StoredTensor], begin: int, held: Bytes) -> None:
        for e in entries:
            if (piece := _whole(e, begin, len(held))) is None:
                continue
            (first, last), kind = piece, KINDS[e.dtype]
            found = first_nan(kind, held[first - begin : last - begin])
            if found is not None:
                at = np.unravel_index((first - e.begin) // kind.size + found, e.shape)
                said = [int(i) for i in at]
                raise CheckpointError(
                    f"{e.file}: {self._name(e)}: element {said} is NaN; {self.remedy}"
                )

    def _name(self, entry: StoredTensor) -> str:
        return next(name for name, other in self._entries.items() if other == entry)

    def ask(self, entries: Sequence[StoredTensor], begin: int, sent: Tensor) -> None:
        """Have the device look for NaN in what it was sent, from file offset `begin` on. Data of
        one dtype is looked at together, since calls of the device cost more than looking."""
        places: dict[str, list[_Place]] = {}
        for e in entries if self.allow is False else ():
            if (piece := _whole(e, begin, sent.shape[0])) is not None:
                cut = range(piece[0], piece[1], _ASKED)
                own = (_Place(e, at, min(at + _ASKED, piece[1])) for at in cut)
                places.setdefault(e.dtype, []).extend(own)
        for dtype, several in places.items():
            for group in _groups(several):
                found = any_nan(dtype, _joined(sent, begin, group))
                with self._lock:
                    self._asked.append((group, found))

    def finish(self, fill: Callable[[Path, int, Tensor], None]) -> None:
        """CheckpointError for a NaN in what was asked about since the last call, which waits for
        the device. fill: reads bytes of a file again."""
        asked = sorted(self._asked, key=lambda a: (a[0][0].entry.file, a[0][0].first))
        self._asked = []
        found = torch.stack([a[1] for a in asked]).tolist() if asked else []
        for (group, _), nan in zip(asked, found, strict=True):
            for e, first, last in group if nan else ():  # read it again, to say where
                fill(e.file, first, room := new_room(last - first))
                self._look((e,), first, room.numpy())
            if nan:
                name, more = self._name(group[0].entry), len(group) - 1
                raise CheckpointError(
                    f"{group[0].entry.file}: {name}{f' or one of {more} behind it' * (more > 0)}: "
                    "is NaN on the device and not in the file: the copy to the device or the "
                    "device is at fault; try again, or another device"
                )


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
