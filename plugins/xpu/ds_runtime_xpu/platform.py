"""Intel GPUs as a platform. Torch is imported only by the methods that hand out torch things."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from ds_runtime.api import (
    DeviceInfo,
    MemoryInfo,
    Refusal,
    TorchPlatform,
    has_library,
    installed,
    package_folder,
    pci_devices,
    torch_built_for,
)
from ds_runtime_xpu import level_zero, software

VENDOR = "0x8086"
CLASSES = ("0x03",)
DRIVERS = ("xe", "i915")
ARCHITECTURES = {0x0B: "xe-hpc", 0xE2: "xe2-hpg"}  # by the high byte of the PCI id


def probe(
    root: Path = Path("/"),
    package: Callable[[str], str | None] = installed,
    search: tuple[str, ...] | None = None,
    folder: Callable[[str], Path | None] = package_folder,
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    devices = pci_devices(root, VENDOR, CLASSES)
    if not devices:
        return Refusal("absent", "no Intel GPU on the PCI bus")
    what = f"{len(devices)} Intel GPU{'s' if len(devices) > 1 else ''}"
    known = [d for d in devices if architecture(_pci_id(d))]
    if not known:
        ids = ", ".join(f"{_pci_id(d):#06x}" for d in devices)
        return Refusal(
            "unsupported", f"{what} with PCI id {ids}; this plugin knows Max 1550 and Arc B-series"
        )
    if not any((device / "driver").resolve().name in DRIVERS for device in known):
        return Refusal(
            "not installed", f"{what}, but neither kernel driver (xe, i915) is bound to it"
        )
    render = root / "dev/dri"
    if not render.is_dir() or not list(render.glob("renderD*")):
        return Refusal("broken", f"{what}, but there is no /dev/dri/renderD128 in this container")
    torch = package("torch")
    if torch is None or ("xpu" not in torch and not torch_built_for("xpu", folder)):
        have = "torch is not installed" if torch is None else f"torch {torch} is another build"
        return Refusal("not installed", f"{what}, but {have}: {software.install()}")
    for name in software.OLDEST:
        old = software.too_old(name, package(name) or "9")
        if old is not None:
            return Refusal("unsupported", f"{what}, but {old}: {software.install()}")
    if not has_library(root, level_zero.LOADER, search):
        return Refusal(
            "broken",
            f"{what}, but the Level Zero loader {level_zero.LOADER} is in no library folder",
        )
    return None


def _pci_id(device: Path) -> int:
    try:
        return int((device / "device").read_text(), 16)
    except (OSError, ValueError):
        return 0


def architecture(pci_id: int) -> str:
    """xe-hpc (Max), xe2-hpg (Arc B-series), or "" for another device."""
    return ARCHITECTURES.get(pci_id >> 8, "")


def describe(gpu: level_zero.Gpu, libraries: frozenset[str]) -> DeviceInfo:
    """A GPU as kernels may look at it. Neither architecture multiplies FP8: oneDNN widens it."""
    arch = architecture(gpu.device)
    if not arch:
        raise level_zero.LoaderError(
            f"{gpu.name} has PCI id {gpu.device:#06x}, which this plugin does not know: use "
            "--platform cpu"
        )
    return DeviceInfo(
        type="xpu",
        name=gpu.name,
        arch=arch,
        features=libraries | {"bf16"},
        fast_dtypes=frozenset({"float32", "bfloat16", "float16"}),
        memory=gpu.memory,
        cores=gpu.cores,
    )


@cache
def _gpu(index: int) -> level_zero.Gpu:
    return level_zero.gpu(index)


class XpuPlatform(TorchPlatform):
    """Local rank r computes on torch's device xpu:r; a GPU of two stacks is two of them."""

    name = "xpu"
    family = "Intel GPUs"
    score = 80
    torch_type = "xpu"
    collectives = "xccl"
    graph = "XPUGraph"

    def info(self, rank: int = 0) -> DeviceInfo:
        return describe(_gpu(rank), software.features())

    def idle_memory(self, rank: int) -> MemoryInfo:
        """All of it: what other processes hold is known once torch has the device."""
        total = _gpu(rank).memory
        return MemoryInfo(total=total, free=total)
