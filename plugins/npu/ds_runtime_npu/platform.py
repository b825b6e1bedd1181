"""What Ascend NPUs, toolkit and packages are here, read from the operating system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_runtime.api import Refusal

INSTALL = 'pip install "ds-runtime[npu]"'
TOOLKITS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")


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


def device_nodes(root: Path) -> list[str]:
    """/dev/davinci0, /dev/davinci1, … (davinci_manager is not a device)."""
    folder = root / "dev"
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.glob("davinci[0-9]*"))


def pci_devices(root: Path) -> list[str]:
    """PCI addresses of Huawei processing accelerators."""
    folder = root / "sys/bus/pci/devices"
    if not folder.is_dir():
        return []
    return [
        device.name
        for device in sorted(folder.iterdir())
        if _read(device / "vendor").strip() == "0x19e5"
        and _read(device / "class").startswith("0x12")
    ]


def probe(
    root: Path = Path("/"), package: Callable[[str], str | None] = installed
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    nodes, pci = device_nodes(root), pci_devices(root)
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
