"""Between host and device without waiting for either.

Copies are queued from and to page-locked memory, so that the host goes on at once. Where the
device's memory is the host's own, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.model.staging import shares_memory

_ALIGN = 64  # bytes: kernels choose wide loads by the alignment of what they get
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Upload:
    """Host arrays on their way to the device: one transfer for all.

    `add` names an array by a number, `send` queues the transfer, `upload[number]` is its tensor.
    `packed`: go through one buffer (default: unless memory is shared).
    """

    def __init__(self, device: torch.device, packed: bool | None = None) -> None:
        self._device = device
        self._packed = not shares_memory(device) if packed is None else packed
        self._arrays: list[npt.NDArray[Any]] = []
        self._tensors: list[Tensor] = []

    def add(self, array: npt.NDArray[Any]) -> int:
        """Of int32, int64, float32 or float64."""
        self._arrays.append(array)
        return len(self._arrays) - 1

    def send(self, into: Tensor | None = None) -> None:
        """Queue the transfer; the arrays may change afterwards, unless memory is shared.

        into: a buffer of bytes on the device. Arrays of the same sizes in the same order always
        come to lie at the same places in it.
        """
        if self._packed or into is not None:
            self._tensors = self._send_packed(into)
        else:
            self._tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in self._arrays]

    def __getitem__(self, number: int) -> Tensor:
        return self._tensors[number]

    def _send_packed(self, into: Tensor | None) -> list[Tensor]:
        begins, end = [], 0
        for array in self._arrays:
            begins.append(end)
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        staged = torch.empty(end, dtype=torch.uint8, pin_memory=not shares_memory(self._device))
        raw = staged.numpy()
        for array, begin in zip(self._arrays, begins, strict=True):
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            raw[begin : begin + array.nbytes] = flat
        if into is None:
            there = staged.to(self._device, non_blocking=True)
        else:
            there = into[:end].copy_(staged, non_blocking=True)
        return [
            there[begin : begin + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for array, begin in zip(self._arrays, begins, strict=True)
        ]


def put(values: Any, dtype: type[np.generic], device: torch.device) -> Tensor:
    """A few host values as a tensor on the device."""
    sent = Upload(device)
    sent.add(np.asarray(values, dtype))
    sent.send()
    return sent[0]


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
