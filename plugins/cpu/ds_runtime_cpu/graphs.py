"""Captured steps: the native calls of a step recorded once, and run again in one call.

While a step streams weights, its caches forget Python: between two kernels, a call that takes two
microseconds in a loop takes twenty. A recording has the arguments of every native call, and torch's
ops where some lie between. What a step allocates is taken from a pool, where a block is free again
as soon as the step lets go of it. So all recordings work in the memory of one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.api import CaptureError, Recorded, Recording
from ds_runtime_cpu import native
from ds_runtime_cpu.replay import Call, again, lowered, together

Array = npt.NDArray[Any]
_EMPTY = frozenset({"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"})
_LINE = 64  # bytes


class _Pool:
    """Blocks of memory that are never given back, each for one tensor at a time."""

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}  # by bytes

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], nbytes > 0, at a cache line. Its block is free once no view is left."""
        size = max(_LINE, 1 << (nbytes - 1).bit_length())
        blocks = self._free.setdefault(size, [])
        block = blocks.pop() if blocks else _aligned(size)
        lent = block[:]  # what the tensor holds on to: when it goes, so has the tensor
        weakref.finalize(lent, blocks.append, block).atexit = False
        return torch.from_numpy(lent)[:nbytes]


def _aligned(size: int) -> Array:
    raw = np.empty(size + _LINE, np.uint8)
    begin = -raw.ctypes.data % _LINE
    return raw[begin : begin + size]


class _Steps(Recording):
    """Torch's ops and native calls, in their order, as what runs them again.

    What native calls work on need not be kept: it lies in the pool, or belongs to who captures.
    """

    def __init__(self, pool: _Pool) -> None:
        super().__init__()
        self._pool = pool
        self._parts: list[Callable[[], None]] = []
        self._row: list[Call] = []  # behind the last part
        self._open: list[tuple[int, int]] = []  # handed out: first and last byte

    def begin(self) -> None:
        """Native calls, too."""
        self._modes.enter_context(native.recorded(self._called))
        super().begin()

    def keep(self, op: Any, made: Tensor) -> Tensor:
        """In the pool."""
        if not made.nbytes:
            return made
        block = self._pool.take(made.untyped_storage().nbytes())
        there = block.view(made.dtype).as_strided(made.shape, made.stride(), made.storage_offset())
        return there if op._schema.name in _EMPTY else there.copy_(made)

    def note(self, op: Recorded) -> None:
        """As native calls, if it can be."""
        if op.op._schema.name in _EMPTY:
            return
        if (calls := lowered(op)) is not None:
            for call in calls:
                self._called(*call)
        else:
            self._close()
            self._parts.append(again(op))

    def handed_out(self, tensor: Tensor) -> None:
        """Until a native call takes it."""
        storage = tensor.untyped_storage()
        if tensor.numel():
            self._open.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def _called(self, address: int, slots: bytes) -> None:
        taken = np.frombuffer(slots, np.int64)
        self._open = [(a, b) for a, b in self._open if not ((taken >= a) & (taken < b)).any()]
        self._row.append(Call(address, slots))

    def _close(self) -> None:
        if self._row:
            self._parts.append(together(self._row))
            self._row = []

    def program(self) -> list[Callable[[], None]]:
        """Raises CaptureError where a kernel has an address that no recorded call was given."""
        if self._open:
            raise CaptureError(
                f"{len(self._open)} addresses of tensors were read for what is not recorded: a "
                "kernel that computes in code of its own declares Promises(graph_safe=False)"
            )
        self._close()
        return self._parts


class HostGraphs:
    """GraphBackend of the CPU. A capture runs the step as well."""

    def __init__(self) -> None:
        self._pool = _Pool()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend. Raises CaptureError for a step with work that cannot be recorded."""
        steps = _Steps(self._pool)
        try:
            steps.begin()
            run()
        finally:
            steps.end()
        program, pool = steps.program(), self._pool

        def replay(kept: _Pool = pool) -> None:
            for part in program:
                part()

        return replay
