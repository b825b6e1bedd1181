"""NVIDIA GPUs as a platform. Torch is imported only by the methods that hand out torch things."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from ds_runtime.api import (
    Communicator,
    DeviceInfo,
    MemoryInfo,
    Refusal,
    TorchPlatform,
    device_nodes,
    has_library,
    install_command,
    installed,
    pci_devices,
    read_file,
)
from ds_runtime_cuda import driver, software

VENDOR = "0x10de"
CLASSES = ("0x03",)
OLDEST = (7, 5)  # the least compute capability that torch for CUDA 13 runs on
_OTHER_BUILDS = ("cpu", "rocm", "xpu")


def driver_version(root: Path) -> str:
    """The kernel driver's version, or ""."""
    text = read_file(root / "proc/driver/nvidia/version").partition("\n")[0]
    words = text.split()
    return next((w for w in words if w[:1].isdigit() and "." in w), "")


def probe(
    root: Path = Path("/"),
    package: Callable[[str], str | None] = installed,
    search: tuple[str, ...] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    nodes, version = device_nodes(root, "nvidia[0-9]*"), driver_version(root)
    pci = pci_devices(root, VENDOR, CLASSES)
    if not nodes and not pci:
        return Refusal("absent", "no NVIDIA GPU: none on the PCI bus, no /dev/nvidia0")
    count = len(nodes) or len(pci)
    what = f"{count} NVIDIA GPU{'s' if count > 1 else ''}"
    if environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1"):
        return Refusal("absent", f"{what}, but CUDA_VISIBLE_DEVICES hides every one")
    if not version:
        return Refusal(
            "not installed", f"{what} on the PCI bus, but the kernel driver is not loaded"
        )
    what += f" with driver {version}"
    if not nodes:
        return Refusal("broken", f"{what}, but there is no /dev/nvidia0 that this process may open")
    torch = package("torch")
    if torch is None or torch.partition("+")[2].startswith(_OTHER_BUILDS):
        have = "torch is not installed" if torch is None else f"torch {torch} is another build"
        return Refusal("not installed", f"{what}, but {have}: {install_command(software.EXTRA)}")
    if not has_library(root, driver.DRIVER, search):
        return Refusal("broken", f"{what}, but the driver's libcuda.so.1 is in no library folder")
    return None


def describe(gpu: driver.Gpu, libraries: frozenset[str]) -> DeviceInfo:
    """A GPU as kernels may look at it."""
    fast, features = {"float32"}, set[str]()
    if gpu.capability >= (8, 0):
        fast |= {"bfloat16", "float16"}
        features.add("bf16")
    if gpu.capability >= (8, 9):
        fast.add("float8_e4m3fn")
        features.add("fp8")
    return DeviceInfo(
        type="cuda",
        name=gpu.name,
        arch=gpu.arch,
        features=libraries | features,
        fast_dtypes=frozenset(fast),
        memory=gpu.memory,
        cores=gpu.cores,
        bandwidth=gpu.bandwidth,
        link="nvlink" if gpu.links else "pcie",
        link_bandwidth=gpu.links,
    )


@cache
def _gpu(index: int) -> driver.Gpu:
    found = driver.gpu(index)
    if found.capability < OLDEST:
        raise driver.DriverError(
            f"{found.name} has compute capability {found.capability[0]}.{found.capability[1]}; "
            f"torch needs {OLDEST[0]}.{OLDEST[1]}: use --platform cpu"
        )
    return replace(found, links=driver.links(found.bus))


class CudaPlatform(TorchPlatform):
    """Local rank r computes on the r-th visible GPU.

    Multicast is never said to be there: whether it may be used depends on how a machine is shared
    out, which no driver call tells without using it.
    """

    name = "cuda"
    family = "NVIDIA GPUs"
    score = 100
    torch_type = "cuda"
    collectives = "nccl"
    graph = "CUDAGraph"
    branches = True
    captures_prefill = True
    ordered_sums = MappingProxyType({"nvlink": (2, 4, 8)})  # as torch's kernels are compiled for
    fast_sums = ordered_sums

    def info(self, rank: int = 0) -> DeviceInfo:
        return describe(_gpu(rank), software.features())

    def idle_memory(self, rank: int) -> MemoryInfo:
        total, free = driver.memory(_gpu(rank).bus)
        return MemoryInfo(total=total, free=free)

    def communicator(
        self, rank: int, size: int, init_method: str, timeout: float = 600.0
    ) -> Communicator:
        from ds_runtime_cuda.nvlink import NvlinkCommunicator

        here = rank if self.local_rank is None else self.local_rank
        return NvlinkCommunicator(
            self.collectives,
            rank,
            size,
            init_method,
            timeout,
            device=self.device(here),
            sizes=lambda: self.ordered_sums.get(self.info(here).link, ()),
        )

    def init_worker(self, rank: int, size: int, threads: int | None = None) -> None:
        super().init_worker(rank, size, threads)
        import torch

        # Contracts accumulate in fp32, also across the parts of a split reduction.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
