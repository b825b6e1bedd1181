"""What NVIDIA hardware, driver and packages are here, read from the operating system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_runtime.api import Refusal
from ds_runtime.platform.probe import device_nodes, has_library, installed, pci_devices, read

VENDOR = "0x10de"
CLASSES = ("0x03",)
PACKAGES = ("torch", "sglang-kernel", "flashinfer-python", "sgl-deep-gemm", "sgl-flash-mla")
INSTALL = 'pip install "ds-runtime[cuda]"'


def driver_version(root: Path) -> str:
    """The kernel driver's version, or ""."""
    text = read(root / "proc/driver/nvidia/version").partition("\n")[0]
    words = text.split()
    return next((w for w in words if w[:1].isdigit() and "." in w), "")


def probe(
    root: Path = Path("/"),
    package: Callable[[str], str | None] = installed,
    search: tuple[str, ...] | None = None,
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    nodes, driver = device_nodes(root, "nvidia[0-9]*"), driver_version(root)
    pci = pci_devices(root, VENDOR, CLASSES)
    if not nodes and not pci:
        return Refusal("absent", "no NVIDIA GPU: none on the PCI bus, no /dev/nvidia0")
    count = len(nodes) or len(pci)
    what = f"{count} NVIDIA GPU{'s' if count > 1 else ''}"
    if not driver:
        return Refusal(
            "not installed", f"{what} on the PCI bus, but the kernel driver is not loaded"
        )
    what += f" with driver {driver}"
    if not nodes:
        return Refusal("broken", f"{what}, but there is no /dev/nvidia0 that this process may open")
    missing = [name for name in PACKAGES if package(name) is None]
    if missing:
        return Refusal("not installed", f"{what}, without {', '.join(missing)}: {INSTALL}")
    if not has_library(root, "libcuda.so.1", search):
        return Refusal("broken", f"{what}, but the driver's libcuda.so.1 is in no library folder")
    return Refusal("unsupported", f"{what}, but this release brings no kernels for it yet")
