"""Ascend NPUs as a platform: what the operating system says of devices, toolkit and packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ds_runtime.api import (
    Communicator,
    DeviceInfo,
    GraphBackend,
    MemoryInfo,
    Platform,
    Refusal,
    device_nodes,
    installed,
    package_folder,
    pci_devices,
    read_file,
)

if TYPE_CHECKING:
    import torch

VENDOR = "0x19e5"
CLASSES = ("0x12",)
INSTALL = 'pip install "ds-runtime[npu]"'
TOOLKITS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")
OLDEST = (2, 9)  # of torch-npu: the first release with these schemas
CHIPS: Mapping[str, tuple[str, str, int]] = {  # PCI device → arch, name, AI cores of a die
    "0xd802": ("ascend910b", "Ascend 910B", 20),
    "0xd803": ("ascend910_93", "Ascend 910C, one of two dies", 24),
}
_MEMORY = 64 << 30  # bytes of a die, until torch-npu is there to ask


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split(".")[:2] if n.isdigit())


def probe(
    root: Path = Path("/"), package: Callable[[str], str | None] = installed
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    # davinci_manager is not a device
    nodes, pci = device_nodes(root, "davinci[0-9]*"), pci_devices(root, VENDOR, CLASSES)
    if not nodes and not pci:
        return Refusal("absent", "no Ascend NPU: none on the PCI bus, no /dev/davinci0")
    count = len(nodes) or len(pci)
    what = f"{count} Ascend NPU{'s' if count > 1 else ''}"
    if not nodes:
        return Refusal(
            "not installed", f"{what} on the PCI bus, but the driver made no /dev/davinci0"
        )
    if not (root / "dev/davinci_manager").exists():
        return Refusal("broken", f"{what}, but /dev/davinci_manager is not in this container")
    if not any((root / folder).exists() for folder in TOOLKITS):
        return Refusal("not installed", f"{what}, without the CANN toolkit in /usr/local/Ascend")
    chips = {read_file(device / "device") for device in pci}
    if chips and not chips & CHIPS.keys():
        known = " and ".join(name for _, name, _ in CHIPS.values())
        said = f"{what} with PCI device {min(chips)}: this release serves {known}"
        return Refusal("unsupported", f"{said}; use --platform cpu")
    version = package("torch-npu")
    if version is None:
        return Refusal("not installed", f"{what}, without torch-npu: {INSTALL}")
    if _release(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        said = f"{what}, but torch-npu {version} is older than {oldest}: {INSTALL}"
        return Refusal("unsupported", said)
    return None


def describe(chip: str, libraries: frozenset[str]) -> DeviceInfo:
    """A die as kernels may look at it, by its PCI device."""
    arch, name, cores = CHIPS.get(chip, next(iter(CHIPS.values())))
    return DeviceInfo(
        type="npu",
        name=name,
        arch=arch,
        features=libraries | {"bf16"},
        fast_dtypes=frozenset({"float32", "bfloat16", "float16", "int8"}),
        memory=_MEMORY,
        cores=cores,
    )


def libraries() -> frozenset[str]:
    """What of torch-npu and a Triton for Ascend is installed."""
    found = {m for m in ("torch_npu", "triton") if package_folder(m) is not None}
    return frozenset(found)


class NpuPlatform(Platform):
    """Local rank r computes on the r-th die."""

    name = "npu"
    score = 100
    asynchronous = True
    captures = True
    kv_share = 0.85

    def info(self, rank: int = 0) -> DeviceInfo:
        found = pci_devices(Path("/"), VENDOR, CLASSES)
        chip = read_file(found[min(rank, len(found) - 1)] / "device") if found else ""
        return describe(chip, libraries())

    def device(self, rank: int = 0) -> torch.device:
        import torch

        return torch.device("npu", rank)

    def memory(self, rank: int = 0) -> MemoryInfo:
        """What torch keeps for later allocations counts as free; before torch is there, all is."""
        torch_npu = sys.modules.get("torch_npu")
        if torch_npu is None:
            return MemoryInfo(total=_MEMORY, free=_MEMORY)
        torch_npu.npu.empty_cache()
        free, total = torch_npu.npu.mem_get_info(self.device(rank))
        return MemoryInfo(total=total, free=free)

    def init_worker(self, rank: int, size: int, threads: int | None = None) -> None:
        import torch
        import torch_npu

        torch_npu.npu.set_device(self.device(rank))
        torch_npu.npu.config.allow_internal_format = True  # of weights in fractal format
        if threads is not None:
            torch.set_num_threads(threads)

    def communicator(
        self, rank: int, size: int, init_method: str, timeout: float = 600.0
    ) -> Communicator:
        from ds_runtime.api import TorchCommunicator

        here = self.device(rank if self.local_rank is None else self.local_rank)
        return TorchCommunicator("hccl", rank, size, init_method, timeout, device=here)

    def graph_backend(self, rank: int = 0) -> GraphBackend:
        from ds_runtime_npu.graphs import NpuGraphs

        return NpuGraphs(self.device(rank))

    def synchronize(self) -> None:
        import torch_npu

        torch_npu.npu.synchronize()
