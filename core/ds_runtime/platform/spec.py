"""The Platform contract: device facts, memory, communication. Torch-free at import.

A plugin subclasses `Platform`; methods are called once per process or once per step, never per
layer. Tensors and torch devices appear only in annotations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.spec import API_VERSION, DeviceInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes, as this process may use it (container limits respected)."""

    total: int
    free: int


class Communicator(Protocol):
    """Collectives of one group of ranks. Every rank calls each in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over the ranks, any shape and float dtype; may reuse `x`'s storage."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] per rank → [..., size * n], concatenated along the last dim by rank."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable object, by rank, on every rank; between trusted ranks only."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Platform(ABC):
    """One kind of device. `score` orders platforms that work here: the highest is `auto`."""

    name: str = ""
    api_version: int = API_VERSION
    score: int = 0

    @abstractmethod
    def info(self, rank: int = 0) -> DeviceInfo:
        """Facts of the device of local rank `rank`; must not import torch."""

    @abstractmethod
    def device(self, rank: int = 0) -> torch.device:
        """The torch device of local rank `rank`."""

    @abstractmethod
    def memory(self, rank: int = 0) -> MemoryInfo:
        """Total and free memory now."""

    def process_env(self) -> Mapping[str, str]:
        """Environment variables that this device's libraries read when they are loaded.

        Set in every process that the engine starts, before torch is imported there, where the
        user has not set them. The caller's own process is left alone.
        """
        return {}

    def init_worker(  # noqa: B027 (optional: most devices need nothing)
        self, rank: int, size: int, threads: int | None = None
    ) -> None:
        """Called once in each rank's process before any tensor exists (threads, affinity)."""

    def communicator(
        self, rank: int, size: int, init_method: str, timeout: float = 600.0
    ) -> Communicator:
        """Join the group of `size` ≥ 2 ranks; `init_method` is a torch.distributed address.

        `timeout`: seconds that this rank waits for the others, in joining and in collectives.
        A platform that does not override this serves one rank.
        """
        raise UnsupportedError(
            f"--tp {size}: platform {self.name} connects no ranks in this version; use --tp 1"
        )

    def synchronize(self) -> None:  # noqa: B027 (optional: synchronous devices need nothing)
        """Wait until the device has finished all work of this process."""
