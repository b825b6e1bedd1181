"""What Ascend NPUs, toolkit and packages are here, read from the operating system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_runtime.api import Refusal, device_nodes, installed, pci_devices

VENDOR = "0x19e5"
CLASSES = ("0x12",)
INSTALL = 'pip install "ds-runtime[npu]"'
TOOLKITS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")


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
    if package("torch-npu") is None:
        return Refusal("not installed", f"{what}, without torch-npu: {INSTALL}")
    return Refusal("unsupported", f"{what}, but this release brings no kernels for it yet")
