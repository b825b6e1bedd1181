"""What Intel GPUs, driver and packages are here, read from the operating system."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ds_runtime.api import Refusal

LIBRARY_FOLDERS = ("usr/lib64", "usr/lib", "lib64", "usr/local/lib", "usr/lib/wsl/lib")
INSTALL = 'pip install "ds-runtime[xpu]" with torch from https://download.pytorch.org/whl/xpu'
DRIVERS = ("xe", "i915")


def installed(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def pci_devices(root: Path) -> list[tuple[str, str]]:
    """(PCI address, bound kernel driver or "") of this vendor's display controllers."""
    folder = root / "sys/bus/pci/devices"
    if not folder.is_dir():
        return []
    found = []
    for device in sorted(folder.iterdir()):
        display = _read(device / "class").startswith("0x03")
        if display and _read(device / "vendor").strip() == "0x8086":
            driver = device / "driver"
            found.append((device.name, driver.resolve().name if driver.exists() else ""))
    return found


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
    devices = pci_devices(root)
    if not devices:
        return Refusal("absent", "no Intel GPU on the PCI bus")
    what = f"{len(devices)} Intel GPU{'s' if len(devices) > 1 else ''}"
    if not any(driver in DRIVERS for _, driver in devices):
        return Refusal(
            "not installed", f"{what}, but neither kernel driver (xe, i915) is bound to it"
        )
    render = root / "dev/dri"
    if not render.is_dir() or not list(render.glob("renderD*")):
        return Refusal("broken", f"{what}, but there is no /dev/dri/renderD128 in this container")
    missing = [] if "xpu" in (package("torch") or "") else ["an XPU build of torch"]
    missing += [] if package("vllm-xpu-kernels") else ["vllm-xpu-kernels"]
    if missing:
        return Refusal("not installed", f"{what}, without {' and '.join(missing)}: {INSTALL}")
    if not has_library(root, "libze_loader.so.1", search):
        return Refusal(
            "broken", f"{what}, but the Level Zero loader libze_loader.so.1 is in no library folder"
        )
    return Refusal("unsupported", f"{what}, but this release brings no kernels for it yet")
