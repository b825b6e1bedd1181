"""Whether an installed package has a function, without importing it. Torch-free.

Each function below returns an `Export` for `Library`: a function of the folder in which a package
lies. It returns names below the package. Importing a vendor's package takes seconds, and some need
a device for it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

from ds_runtime.platform.probe import exported_names

Export = Callable[[Path], Iterable[str]]


def names(module: str = "", beside: str = "*") -> Export:
    """Returns an Export of the names that the package, or a module inside it, binds at its top
    level.

    module: "" is the package itself; names of a module are "module.name". beside: the glob pattern
    of a file of the package. Without such a file the names do not count, because a module may be
    there without its binary.
    """

    def found(folder: Path) -> Iterable[str]:
        if not any(folder.glob(beside)):
            return ()
        front = f"{module}." if module else ""
        return (front + name for name in exported_names(folder, module))

    return found


def text(name: str, pattern: str, said: str) -> Export:
    """Returns an Export of one name, which counts if a file of the glob pattern has the text
    `said`. That is the definition of a function in Python, or the schema of an op in the binary
    that registers it.
    """

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
