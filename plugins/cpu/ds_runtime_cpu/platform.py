"""The CPU as a platform. Torch is imported only by the methods that hand out torch things."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from ds_runtime.api import Communicator, DeviceInfo, MemoryInfo, Platform
from ds_runtime_cpu import machine

if TYPE_CHECKING:
    import torch


@cache
def _device_info() -> DeviceInfo:
    processor = machine.processor()
    total, _ = machine.memory()
    return DeviceInfo(
        type="cpu",
        name=processor.name,
        arch=processor.arch,
        features=processor.features,
        fast_dtypes=machine.fast_dtypes(processor.features),
        memory=total,
        cores=machine.cores(),
    )


class CpuPlatform(Platform):
    """Every rank shares the one device; ranks divide its cores."""

    name = "cpu"
    score = 1

    def info(self, rank: int = 0) -> DeviceInfo:
        return _device_info()

    def device(self, rank: int = 0) -> torch.device:
        import torch

        return torch.device("cpu")

    def memory(self, rank: int = 0) -> MemoryInfo:
        total, free = machine.memory()
        return MemoryInfo(total=total, free=free)

    def process_env(self) -> Mapping[str, str]:
        """Bounded spinning for libgomp, whose own bound is milliseconds.

        That long a thread would burn a core that the thread it waits for may need. 2000 turns
        are some tens of microseconds: they bridge the gap between two kernels, as before
        (benchmarks/results/cpu_threads.md).
        """
        return {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "2000"}

    def init_worker(self, rank: int, size: int, threads: int | None = None) -> None:
        import torch

        torch.set_num_threads(threads or max(1, machine.cores() // size))

    def communicator(
        self, rank: int, size: int, init_method: str, timeout: float = 600.0
    ) -> Communicator:
        import torch

        from ds_runtime.parallel.group import TorchCommunicator

        # With more than two ranks a 16-bit sum would round at every hop.
        wide = torch.float32 if size > 2 else None
        return TorchCommunicator("gloo", rank, size, init_method, timeout, wide)
