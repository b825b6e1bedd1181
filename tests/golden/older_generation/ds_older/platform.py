"""The vendor's device: this machine's processor under another name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_runtime.api import DeviceInfo, MemoryInfo, Platform

if TYPE_CHECKING:
    import torch

_MEMORY = 4 << 30


class OlderPlatform(Platform):
    name = "older"
    api_version = 1
    score = -5

    def info(self, rank: int = 0) -> DeviceInfo:
        return DeviceInfo("cpu", "Older One", "older1", memory=_MEMORY, cores=2)

    def device(self, rank: int = 0) -> torch.device:
        import torch

        return torch.device("cpu")

    def memory(self, rank: int = 0) -> MemoryInfo:
        return MemoryInfo(total=_MEMORY, free=_MEMORY // 2)
