"""Questions that a platform's probe asks the operating system. No process is started, no torch.

`root` is the file system's root; tests pass a folder of their own.
"""

from __future__ import annotations

import os
from pathlib import Path

_LIBRARY_FOLDERS = ("usr/lib64", "usr/lib", "lib64", "usr/local/lib", "usr/lib/wsl/lib")


def installed(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_file(path: Path) -> str:
    """A small system file's text without outer white space, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def device_nodes(root: Path, pattern: str) -> list[str]:
    """Names in /dev that match a glob pattern, sorted."""
    folder = root / "dev"
    return sorted(p.name for p in folder.glob(pattern)) if folder.is_dir() else []


def pci_devices(root: Path, vendor: str, classes: tuple[str, ...]) -> list[Path]:
    """Folders of PCI devices, named by address. `vendor` like "0x1af4", `classes` as prefixes:
    "0x03" display controllers, "0x12" processing accelerators.
    """
    folder = root / "sys/bus/pci/devices"
    if not folder.is_dir():
        return []
    return [
        device
        for device in sorted(folder.iterdir())
        if read_file(device / "vendor") == vendor
        and read_file(device / "class").startswith(classes)
    ]


def has_library(root: Path, name: str, search: tuple[str, ...] | None = None) -> bool:
    """Whether `name` lies where the linker looks; `search` stands for LD_LIBRARY_PATH."""
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":") if search is None else list(search)
    folders = [Path(p) for p in paths if p] + [root / p for p in _LIBRARY_FOLDERS]
    folders += sorted(root.glob("usr/lib/*-linux-gnu"))
    return any((folder / name).exists() for folder in folders)
