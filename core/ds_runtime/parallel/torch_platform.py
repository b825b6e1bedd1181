"""What platforms of one kind have in common: devices that torch itself computes on.

Torch has a module per kind of device (`torch.NAME`) with one interface for memory, streams and
graphs, and a torch.distributed backend that moves its tensors. A plugin's platform names these and
adds what only its operating system and driver know. Nothing here knows a vendor.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from ds_runtime.platform.contract import Communicator, GraphBackend, MemoryInfo, Platform

if TYPE_CHECKING:
    import torch


class TorchPlatform(Platform):
    """Local rank r computes on torch's device `torch_type`:r.

    collectives: the torch.distributed backend that moves its tensors. graph: the name of the
    class that captures, in torch's module of the device.
    """

    torch_type: str
    collectives: str
    graph: str
    asynchronous = True
    captures = True
    own_memory = True

    def runtime(self) -> Any:
        """Torch's module of the device. Override where another package has to bring it."""
        import torch

        return getattr(torch, self.torch_type)

    @abstractmethod
    def idle_memory(self, rank: int) -> MemoryInfo:
        """Memory while torch has not opened the device; must not import torch."""

    def device(self, rank: int = 0) -> torch.device:
        self.runtime()  # it may be what tells torch of the type
        import torch

        return torch.device(self.torch_type, rank)

    def memory(self, rank: int = 0) -> MemoryInfo:
        """What torch keeps for later allocations counts as free."""
        opened = getattr(sys.modules.get("torch"), self.torch_type, None)
        if opened is None or not opened.is_initialized():
            return self.idle_memory(rank)
        opened.empty_cache()
        free, total = opened.mem_get_info(self.device(rank))
        return MemoryInfo(total=total, free=free)

    def init_worker(self, rank: int, size: int, threads: int | None = None) -> None:
        import torch

        self.runtime().set_device(self.device(rank))
        if threads is not None:
            torch.set_num_threads(threads)

    def communicator(
        self, rank: int, size: int, init_method: str, timeout: float = 600.0
    ) -> Communicator:
        from ds_runtime.parallel.group import TorchCommunicator

        here = self.device(rank if self.local_rank is None else self.local_rank)
        return TorchCommunicator(self.collectives, rank, size, init_method, timeout, device=here)

    def graph_backend(self, rank: int = 0) -> GraphBackend:
        from ds_runtime.platform.graphs import TorchGraphs

        return TorchGraphs(self.runtime(), self.graph, self.device(rank), self.branches)

    def synchronize(self) -> None:
        self.runtime().synchronize()
