"""Between host and device without waiting for either.

Copies are queued from and to page-locked memory, so that the host continues at once. Where the
device's memory is the host's own, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import pack_into
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.checkpoint.staging import shares_memory

Array = npt.NDArray[Any]
Table = npt.NDArray[np.int32]
"""Whose pages lie where: [sequences, pages]."""
_ALIGN = 64  # bytes: kernels choose wide loads by the alignment of what they get
_LAYOUTS = 64  # of a buffer that are remembered
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


class Upload:
    """Host arrays on their way to the device: one transfer for all.

    `add` names an array by a number, `send` queues the transfer, `upload[number]` is its tensor.
    `packed`: go through one buffer (default: unless memory is shared).
    """

    def __init__(self, device: torch.device, packed: bool | None = None) -> None:
        self._device = device
        self._packed = not shares_memory(device) if packed is None else packed
        self._arrays: list[Array] = []
        self._tensors: list[Tensor] = []

    def add(self, array: Array) -> int:
        """Of int32, int64, float32, float64 or bool."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def array(self, number: int) -> Array:
        """One that was added, on the host."""
        return self._arrays[number]

    def send(self, into: Buffer | None = None) -> None:
        """Queue the transfer; the arrays may change afterwards, unless memory is shared and they
        go into no buffer.
        """
        if into is not None:
            self._tensors = into.receive(self._arrays)
        elif self._packed:
            begins, end = _places(self._arrays)
            there = _staged(self._arrays, begins, end, self._device)
            there = there.to(self._device, non_blocking=True)
            self._tensors = _views(there, self._arrays, begins)
        else:
            self._tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in self._arrays]

    def __getitem__(self, number: int) -> Tensor:
        return self._tensors[number]


class Buffer:
    """Bytes on the device that uploads go into, each over the last one.

    Arrays of the same dtypes and shapes in the same order always come to lie at the same places in
    it. in_place: the host writes them there (default: where memory is shared).
    """

    def __init__(self, nbytes: int, device: torch.device, in_place: bool | None = None) -> None:
        size = -(-nbytes // _ALIGN) * _ALIGN
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        in_place = shares_memory(device) if in_place is None else in_place
        self._host = self._bytes.numpy() if in_place else None
        self._layouts: dict[tuple[Any, ...], _Layout] = {}

    def receive(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays, once what is queued here has run, and until the next ones come."""
        key = tuple((array.dtype, array.shape) for array in arrays)
        if (layout := self._layouts.get(key)) is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = self._layout(arrays)
        if self._host is None:
            staged = _staged(arrays, layout.begins, layout.end, self._bytes.device)
            self._bytes[: layout.end].copy_(staged, non_blocking=True)
        else:
            for array, place in zip(arrays, layout.host, strict=True):
                place[...] = array
        return layout.tensors

    def _layout(self, arrays: Sequence[Array]) -> _Layout:
        begins, end = _places(arrays)
        size = len(self._bytes)
        assert end <= size, f"arrays of {end} bytes for a buffer of {size}"
        host = [] if self._host is None else _views(self._host, arrays, begins)
        return _Layout(begins, end, _views(self._bytes, arrays, begins), host)


class Steady:
    """A buffer for arrays that are often those sent last: the very same ones, which nobody writes
    to, are not sent again.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._buffer = Buffer(nbytes, device)
        self._arrays: list[Array] = []
        self._tensors: list[Tensor] = []

    def send(self, arrays: list[Array]) -> list[Tensor]:
        """As `Buffer.receive`."""
        held = self._arrays
        if len(held) != len(arrays) or any(a is not b for a, b in zip(held, arrays, strict=True)):
            self._tensors, self._arrays = self._buffer.receive(arrays), arrays
        return self._tensors


def padded(lists: Sequence[list[int]]) -> Table:
    """[sequences, most] int32: each one's pages, filled up with its first."""
    most, flat = max(map(len, lists), default=1), list[int]()
    for pages in lists:
        flat += pages
        flat += pages[:1] * (most - len(pages))
    table = np.empty((len(lists), most), np.int32)
    pack_into(f"{len(flat)}i", table.data, 0, *flat)  # numpy reads ints a third as fast
    return table


class PageTable:
    """A captured step's page table at a fixed place, `tensor` [rows, pages] int32 of the spare page
    at first. It goes to the device when it has changed: a sequence got a page, or another came.
    """

    def __init__(self, rows: int, pages: int, spare: int, device: torch.device) -> None:
        self.tensor = torch.full((rows, pages), spare, dtype=torch.int32, device=device)
        self._held: Table | None = None
        self._next: Table | None = None
        self._spare = spare
        self._lists: list[list[int]] | None = None
        self._whole = np.zeros((rows, 1), np.int32)

    def held(self, lists: list[list[int]]) -> Table:
        """All pages of sequences, filled up with each one's first, and of spare ones after them:
        [rows, most]. The same array, which nobody changes, while the pages are the same.
        """
        if lists != self._lists:
            spare = [[self._spare]] * (self.tensor.shape[0] - len(lists))
            self._whole, self._lists = padded([*lists, *spare]), lists
        return self._whole

    def add(self, table: Table, upload: Upload) -> int | None:
        """[rows, n] for the next step, n ≤ pages: its number in the upload; None if it is there."""
        if self._held is table or (self._held is not None and np.array_equal(self._held, table)):
            return None
        self._next = table
        return upload.add(table)

    def take(self, sent: Upload, number: int | None) -> None:
        """What `add` has added, once it was sent."""
        if number is not None:
            table = sent[number]
            self.tensor[:, : table.shape[1]].copy_(table)
            self._held = self._next


class _Layout(NamedTuple):
    """Where arrays begin in a buffer, and the last one ends; as tensors, and as the host writes
    them where it can."""

    begins: list[int]
    end: int
    tensors: list[Tensor]
    host: list[Array]


def _places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """(where each begins, behind the last)."""
    begins, end = [], 0
    for array in arrays:
        begins.append(end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    return begins, end


@overload
def _views(there: Tensor, arrays: Sequence[Array], begins: list[int]) -> list[Tensor]: ...
@overload
def _views(there: Array, arrays: Sequence[Array], begins: list[int]) -> list[Array]: ...
def _views(there: Any, arrays: Sequence[Array], begins: list[int]) -> list[Any]:
    found = []
    for array, begin in zip(arrays, begins, strict=True):
        dtype = _DTYPES[array.dtype] if isinstance(there, Tensor) else array.dtype
        flat = there[begin : begin + array.nbytes].view(dtype)
        found.append(flat if array.ndim == 1 else flat.reshape(array.shape))
    return found


def _staged(arrays: Sequence[Array], begins: list[int], end: int, device: torch.device) -> Tensor:
    """Bytes of the host, of which a device may take them by itself."""
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=not shares_memory(device))
    for array, place in zip(arrays, _views(staged.numpy(), arrays, begins), strict=True):
        place[...] = array
    return staged


def put(values: Any, dtype: type[np.generic], device: torch.device) -> Tensor:
    """A few host values as a tensor on the device."""
    sent = Upload(device)
    sent.add(np.asarray(values, dtype))
    sent.send()
    return sent[0]


def taken(values: Tensor, places: Sequence[int]) -> Tensor:
    """A copy of the values at these places: of the first ones, without a transfer."""
    if places == list(range(len(places))):
        return values[: len(places)].clone()
    return values[put(places, np.int64, values.device)]


class Download:
    """Tensors on their way to the host, as they are at this point of the device's queue."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._event: torch.Event | None = None
        device = self._tensors[0].device if self._tensors else torch.device("cpu")
        if not shares_memory(device):
            self._tensors = [_to_host(t) for t in self._tensors]
            self._event = torch.Event(device)
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once the device has got that far, and no later work."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
