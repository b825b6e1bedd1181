"""What the operating system and the packages say, whatever plugins think of it. Torch-free.

For `ds-runtime doctor`: devices on the PCI bus with their kernel drivers, and the packages of a
plugin's extra that are missing or have another version than it asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from ds_runtime.platform.probe import read_file

KINDS = {"0x03": "display controller", "0x12": "processing accelerator"}  # PCI classes


def pci(root: Path = Path("/")) -> Iterator[tuple[str, str]]:
    """(kind, sentence) per sort of device that may compute: how many, ids, kernel driver."""
    found: Counter[tuple[str, str, str]] = Counter()
    folder = root / "sys/bus/pci/devices"
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind = KINDS.get(read_file(device / "class")[:4])
        if kind is not None:
            ids = ":".join(read_file(device / f).removeprefix("0x") for f in ("vendor", "device"))
            link = device / "driver"
            found[kind, ids, link.resolve().name if link.exists() else ""] += 1
    for (kind, ids, driver), count in found.items():
        bound = f"kernel driver {driver}" if driver else "no kernel driver is bound to it"
        yield kind, f"{count} × {ids}, {bound}"
    if not found:
        yield "pci", "no display controller and no processing accelerator on the bus"


def has_extra(distribution: str, extra: str) -> bool:
    """Whether a distribution declares this extra, with requirements."""
    return next(_wanted(distribution, extra), None) is not None


def mismatches(distribution: str, extra: str) -> list[str]:
    """Sentences on packages of an extra that are missing, or not of a version that it takes."""
    said = []
    for requirement in _wanted(distribution, extra):
        try:
            have = version(requirement.name)
        except PackageNotFoundError:
            said.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(have, prereleases=True):
            said.append(f"{requirement.name} is {have}, expected {requirement.specifier}")
    return said


def _wanted(distribution: str, extra: str) -> Iterator[Requirement]:
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            yield requirement
