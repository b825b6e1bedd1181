"""What NVIDIA hardware, driver and packages are here, read from the operating system."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ds_runtime.api import Refusal

VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"
PACKAGES = ("torch", "sglang-kernel", "flashinfer-python", "sgl-deep-gemm", "sgl-flash-mla")
LIBRARY_FOLDERS = ("usr/lib64", "usr/lib", "lib64", "usr/local/lib", "usr/lib/wsl/lib")
INSTALL = 'pip install "ds-runtime[cuda]"'


def installed(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def pci_devices(root: Path) -> list[str]:
    """PCI addresses of display controllers and accelerators of this vendor."""
    folder = root / "sys/bus/pci/devices"
    if not folder.is_dir():
        return []
    return [
        device.name
        for device in sorted(folder.iterdir())
        if _read(device / "vendor") == VENDOR and _read(device / "class").startswith(DISPLAY_CLASS)
    ]


def device_nodes(root: Path) -> list[str]:
    """/dev/nvidia0, /dev/nvidia1, …"""
    folder = root / "dev"
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.glob("nvidia[0-9]*"))


def driver_version(root: Path) -> str:
    """The kernel driver's version, or ""."""
    text = _read(root / "proc/driver/nvidia/version").partition("\n")[0]
    words = text.split()
    return next((w for w in words if w[:1].isdigit() and "." in w), "")


def has_library(root: Path, name: str, search: tuple[str, ...] | None = None) -> bool:
    """Whether `name` lies where the linker looks (no process is started to ask it)."""
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":") if search is None else list(search)
    folders = [Path(p) for p in paths if p] + [root / p for p in LIBRARY_FOLDERS]
    folders += sorted(root.glob("usr/lib/*-linux-gnu"))
    return any((folder / name).exists() for folder in folders)


def probe(
    root: Path = Path("/"),
    package: Callable[[str], str | None] = installed,
    search: tuple[str, ...] | None = None,
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    nodes, driver = device_nodes(root), driver_version(root)
    pci = pci_devices(root)
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
