"""What AMD GPUs, driver and packages are here, read from the operating system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ds_runtime.api import Refusal, installed, pci_devices, read_file

VENDOR = "0x1002"
CLASSES = ("0x03", "0x12")
INSTALL = "install a ROCm build of torch and amd-aiter from source (see docs/install.md)"


def architectures(root: Path) -> list[str]:
    """gfx names of the compute devices that the kernel driver lists, e.g. "gfx942"."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    if not nodes.is_dir():
        return []
    found = []
    for node in sorted(nodes.iterdir()):
        for line in read_file(node / "properties").splitlines():
            key, _, value = line.partition(" ")
            if key == "gfx_target_version" and value.strip().isdigit() and int(value):
                number = int(value)  # 90402 → gfx942: major, minor, stepping in hexadecimal
                major, minor, step = number // 10000, number // 100 % 100, number % 100
                found.append(f"gfx{major}{minor:x}{step:x}")
    return found


def probe(
    root: Path = Path("/"), package: Callable[[str], str | None] = installed
) -> Refusal | None:
    """Why no platform is offered; arguments stand for the machine in tests."""
    names, pci = architectures(root), pci_devices(root, VENDOR, CLASSES)
    if not names and not pci:
        return Refusal("absent", "no AMD GPU: none on the PCI bus, none known to the kernel driver")
    if not names:
        what = f"{len(pci)} AMD GPU{'s' if len(pci) > 1 else ''} on the PCI bus"
        return Refusal(
            "not installed", f"{what}, but the kernel driver amdgpu lists none for compute"
        )
    what = f"{len(names)} AMD GPU{'s' if len(names) > 1 else ''} ({', '.join(sorted(set(names)))})"
    if not (root / "dev/kfd").exists():
        return Refusal("broken", f"{what}, but there is no /dev/kfd in this container")
    torch = package("torch") or ""
    missing = [] if "rocm" in torch else ["a ROCm build of torch"]
    missing += [] if package("amd-aiter") else ["amd-aiter"]
    if missing:
        return Refusal("not installed", f"{what}, without {' and '.join(missing)}: {INSTALL}")
    return Refusal("unsupported", f"{what}, but this release brings no kernels for it yet")
