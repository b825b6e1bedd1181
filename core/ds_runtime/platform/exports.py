"""Whether an installed package has a function, without importing it. Torch-free.

Each of these gives an `Export`: a function of the folder in which a package lies that returns names
below the package. Importing a vendor's package takes seconds, and some want a device for it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

from ds_runtime.platform.probe import exported_names

Export = Callable[[Path], Iterable[str]]


def names(module: str = "", beside: str = "*") -> Export:
    """Returns what gives the names that the package, or a module inside it, binds at its top level.

    Names of a module are "module.name". `beside`: the glob pattern of a file of the package without
    which they do not count, for a module may be there without its binary.
    """

    def found(folder: Path) -> Iterable[str]:
        if not any(folder.glob(beside)):
            return ()
        front = f"{module}." if module else ""
        return (front + name for name in exported_names(folder, module))

    return found


def text(name: str, pattern: str, said: str) -> Export:
    """Returns what gives this name where a file of the glob pattern has a text. It is the
    definition of a function in Python, or the schema of an op in the binary that registers it."""

    def found(folder: Path) -> Iterable[str]:
        return (name,) if holds(folder, pattern, said) else ()

    return found


def holds(folder: Path, pattern: str, said: str) -> bool:
    """Whether a file of the glob pattern in the folder has this text."""
    for path in sorted(folder.glob(pattern)):
        with path.open("rb") as file:
            try:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    if mapped.find(said.encode()) >= 0:
                        return True
            except ValueError:  # an empty file cannot be mapped
                continue
    return False
