"""Blocks of caches, copied between a device and host memory while others compute.

A copy is queued layer by layer, so that compute may continue from the first layer while the others
are still under way. Torch-free at import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ds_runtime.ops.contract import load_attr

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ds_runtime.ops.kernel import Layout


class LayerBlocks(NamedTuple):
    """Blocks of one layer's cache, and their places in host memory.

    cache: the layer's tensor. layout: its layout. blocks: their numbers. host: [blocks, bytes of a
    block] uint8, in the order of `blocks`.
    """

    cache: Tensor
    layout: Layout
    blocks: Sequence[int]
    host: Tensor


class Copying(Protocol):
    """Copies that have begun, numbered like the layers that were given."""

    def ended(self, layer: int) -> bool:
        """Whether this layer's blocks are copied; waits for nothing."""
        ...

    def wait(self, layer: int) -> None:
        """What is queued on the device from now on runs once this layer's blocks are copied."""
        ...

    def finish(self) -> None:
        """Return once all are copied."""
        ...


class PageCopies(Protocol):
    """Copies blocks to and from host memory. One thread calls it, the one that queues steps.
    It does not wait if host memory is of `buffer`.

    A copy begins once all that was queued before it has run, and leaves what is queued after it
    alone. Host memory that was given must stay as it is until the copies have ended, and so must
    the blocks that are read. Whoever raises has nothing under way any more.
    """

    def buffer(self, blocks: int, size: int) -> Tensor:
        """Host memory that the device copies fastest from and to: [blocks, size] uint8."""
        ...

    def save(self, layers: Sequence[LayerBlocks]) -> Copying:
        """Copy blocks to host memory, as their layouts export them."""
        ...

    def load(self, layers: Sequence[LayerBlocks]) -> Copying:
        """Copy blocks of host memory to the device: the inverse of `save`."""
        ...


@dataclass(slots=True)
class _Queued:
    """Copying, on a stream beside others. held: the caches, host memory and numbers of blocks that
    its copies read or write, by layer."""

    runtime: Any
    device: torch.device
    held: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)

    def ended(self, layer: int) -> bool:
        return bool(self.events[layer].query())

    def wait(self, layer: int) -> None:
        self.runtime.current_stream(self.device).wait_event(self.events[layer])

    def finish(self) -> None:
        for event in self.events[-1:]:
            event.synchronize()
        self.held.clear()


class _Ended:
    """Copying, where a copy has ended when it returns."""

    def ended(self, layer: int) -> bool:
        return True

    def wait(self, layer: int) -> None:
        """There is nothing to wait for."""

    def finish(self) -> None:
        """As `wait`."""


class TorchPageCopies:
    """PageCopies over torch: on a side stream, where torch has streams for the device, with host
    memory that is page-locked; elsewhere plain copies.

    A layer's blocks lie on the device once more, as its layout exports them, and no longer than
    until the next layer's do. Torch gives memory that was taken on a stream, and let go, to what is
    queued on this stream next: that runs later, so nothing has to hold it.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        runtime = None if device.type == "cpu" else getattr(torch, device.type, None)
        self._runtime: Any = runtime if hasattr(runtime, "Stream") else None
        self._stream = self._runtime.Stream(device) if self._runtime else None

    def buffer(self, blocks: int, size: int) -> Tensor:
        """As PageCopies."""
        import torch

        return torch.empty(blocks, size, dtype=torch.uint8, pin_memory=self._runtime is not None)

    def save(self, layers: Sequence[LayerBlocks]) -> Copying:
        """As PageCopies."""
        return self._copy(layers, self._save)

    def load(self, layers: Sequence[LayerBlocks]) -> Copying:
        """As PageCopies."""
        return self._copy(layers, self._load)

    def _save(self, one: LayerBlocks, numbers: Tensor) -> None:
        one.host.copy_(load_attr(one.layout.export)(one.cache, numbers), non_blocking=True)

    def _load(self, one: LayerBlocks, numbers: Tensor) -> None:
        found = one.host.to(self._device, non_blocking=True)
        load_attr(one.layout.restore)(one.cache, numbers, found)

    def _copy(
        self, layers: Sequence[LayerBlocks], copy: Callable[[LayerBlocks, Tensor], None]
    ) -> Copying:
        import torch

        queued, beside = _Queued(self._runtime, self._device), self._beside()
        with torch.inference_mode(), beside:
            try:
                for one in layers:
                    numbers = self._numbers(one.blocks)
                    if one.blocks:
                        copy(one, numbers)
                    if self._runtime is not None:
                        queued.held.append((one, numbers))
                        queued.events.append(self._runtime.Event())
                        queued.events[-1].record(self._stream)
            except BaseException:
                if self._stream is not None:
                    self._stream.synchronize()
                raise
        return _Ended() if self._runtime is None else queued

    def _numbers(self, blocks: Sequence[int]) -> Tensor:
        """On the device; from page-locked memory, so that the host waits for nothing."""
        import torch

        made = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._runtime is not None)
        return made.to(self._device, non_blocking=True)

    def _beside(self) -> AbstractContextManager[Any]:
        """Within, work is queued on the side stream, behind what was queued so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(self._runtime.current_stream(self._device))
        beside: AbstractContextManager[Any] = self._runtime.stream(self._stream)
        return beside
