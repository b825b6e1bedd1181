"""What Intel GPUs, driver and packages are here, read from the operating system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_runtime.api import Refusal, has_library, installed, pci_devices

VENDOR = "0x8086"
CLASSES = ("0x03",)
INSTALL = 'pip install "ds-runtime[xpu]" with torch from https://download.pytorch.org/whl/xpu'
DRIVERS = ("xe", "i915")


def probe(
    root: Path = Path("/"),
    package: Callable[[str], str | None] = installed,
    search: tuple[str, ...] | None = None,
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    devices = pci_devices(root, VENDOR, CLASSES)
    if not devices:
        return Refusal("absent", "no Intel GPU on the PCI bus")
    what = f"{len(devices)} Intel GPU{'s' if len(devices) > 1 else ''}"
    if not any((device / "driver").resolve().name in DRIVERS for device in devices):
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
