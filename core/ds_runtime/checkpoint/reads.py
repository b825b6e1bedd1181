"""Plain reads of files into memory, by several threads: one copies from the page cache slower than
memory allows. Nothing of a file stays mapped, so the process holds exactly what the caller keeps.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ds_runtime.checkpoint.nan import PIECE, Bytes
from ds_runtime.errors import CheckpointError

ALIGN = 16  # bytes; what begins elsewhere in memory is not what every kernel takes
_READERS = 16  # threads at most, and at least so many bytes for each
_SHARE = 1 << 20
_LARGE = 32 << 20  # bytes from which memory always comes from the system
_READ = 1 << 30  # bytes per system call; Linux moves at most 2 GiB at once

Look = Callable[[int, Bytes], None]  # (file offset, bytes that were read from there)


class Files:
    """Files that are open for reading. Several threads may ask."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._own = threading.local()  # of each thread that reads
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._open)

    def undivided(self) -> None:
        """The calling thread reads alone from now on: there are enough that do."""
        self._own.undivided = True

    def fill(self, path: Path, begin: int, room: Tensor, look: Look | None = None) -> None:
        """Read a file's bytes from offset `begin` on into all of `room`, by several threads, which
        look at what they have read."""
        size, held = room.shape[0], room.numpy()
        with self._lock:
            file = self._open.get(path)
            if file is None:
                file = self._open[path] = os.open(path, os.O_RDONLY)
            if self._readers is None:
                self._readers = ThreadPoolExecutor(_READERS - 1, "checkpoint")
            pool = self._readers
        most = 1 if getattr(self._own, "undivided", False) else _READERS
        count = max(1, min(torch.get_num_threads(), most, size // _SHARE))
        edges = [*(size * i // count // ALIGN * ALIGN for i in range(count)), size]
        parts = [(file, path, held[a:b], begin + a, look) for a, b in pairwise(edges)]
        others = [pool.submit(_fill_part, *part) for part in parts[1:]]
        try:
            _fill_part(*parts[0])
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """Close the files; reading opens them again."""
        if self._readers is not None:
            self._readers.shutdown()
            self._readers = None
        self._own = threading.local()
        _close(self._open)


def _fill_part(file: int, name: Path, held: Bytes, begin: int, look: Look | None) -> None:
    """All of `held` from an offset of an open file, in pieces that are looked at."""
    step = len(held) or 1 if look is None else PIECE
    for at in range(0, len(held), step):
        piece = held[at : at + step]
        _fill(file, name, memoryview(piece.data), begin + at)
        if look is not None:
            look(begin + at, piece)


def new_room(size: int) -> Tensor:
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
