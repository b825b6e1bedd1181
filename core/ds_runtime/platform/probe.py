"""Questions that a platform's probe asks the operating system. No process is started, no torch.

`root` is the file system's root; tests pass a folder of their own.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

_LIBRARY_FOLDERS = ("usr/lib64", "usr/lib", "lib64", "usr/local/lib", "usr/lib/wsl/lib")


class DeviceError(RuntimeError):
    """A rank has no device. The text says why."""


def installed(package: str) -> str | None:
    """Returns the installed version of a distribution, or None. A `package` that is installed
    meanwhile counts in the next process.
    """
    return _installed(package, tuple(sys.path))


@cache
def _installed(package: str, path: tuple[str, ...]) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def install_command(extra: str, distribution: str = "ds-runtime") -> str:
    """Returns the command that installs a distribution with an extra, from where it was installed
    itself: the folder of its sources (`pip install -e ".[otel]"`), a repository, or an index.
    """
    from importlib.metadata import Distribution, PackageNotFoundError

    try:
        text = Distribution.from_name(distribution).read_text("direct_url.json")
    except PackageNotFoundError:  # sources on the path
        text = '{"dir_info": {"editable": true}}'
    said = json.loads(text or "{}")
    if (folder := said.get("dir_info")) is not None:
        flag = "-e " if folder.get("editable") else ""
        return f'pip install {flag}".[{extra}]"'
    at = ""
    if (source := said.get("vcs_info")) is not None:
        commit = source.get("commit_id", "")
        at = f" @ {source.get('vcs', 'git')}+{said.get('url')}{commit and f'@{commit}'}"
    return f'pip install "{distribution}[{extra}]{at}"'


def read_file(path: Path) -> str:
    """Returns the text of a small system file, `path`, without outer white space, or "" if it
    cannot be read.
    """
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def device_nodes(root: Path, pattern: str) -> list[str]:
    """Returns the names in /dev below `root` that match a glob pattern, sorted."""
    folder = root / "dev"
    return sorted(p.name for p in folder.glob(pattern)) if folder.is_dir() else []


def pci_devices(root: Path, vendor: str, classes: tuple[str, ...]) -> list[Path]:
    """Returns the folders of PCI devices below `root`, named by address. vendor: like "0x1af4".
    classes: prefixes, such as "0x03" for display controllers and "0x12" for processing
    accelerators.
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


def visible(value: str, count: int) -> list[int]:
    """Returns the device numbers that a variable's `value`, such as "0,2", shows, in its order. It
    ends at the first number that none of `count` devices has.
    """
    numbers = (n.strip() for n in value.split(","))
    return [int(n) for n in takewhile(lambda n: n.isdigit() and int(n) < count, numbers)]


def has_library(root: Path, name: str, search: tuple[str, ...] | None = None) -> bool:
    """Returns whether a file `name` lies where the linker looks, below `root`. search: folders in
    place of those in LD_LIBRARY_PATH.
    """
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":") if search is None else list(search)
    folders = [Path(p) for p in paths if p] + [root / p for p in _LIBRARY_FOLDERS]
    folders += sorted(root.glob("usr/lib/*-linux-gnu"))
    return any((folder / name).exists() for folder in folders)


def package_folder(module: str) -> Path | None:
    """Returns where the package of `module` lies, without importing it, or None."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def torch_built_for(software: str, folder: Callable[[str], Path | None] = package_folder) -> str:
    """Returns the version of a vendor's software that the installed torch was built for, or "". A
    torch built from source has a commit in its own version.

    software: as torch's version.py names it. folder: finds the package; tests replace it.
    """
    where = folder("torch")
    text = read_file(where / "version.py") if where is not None else ""
    found = re.search(rf"^{software}\b.*= *['\"]([\d.]+)", text, re.MULTILINE)
    return found[1] if found else ""


def exported_names(folder: Path, module: str = "") -> frozenset[str]:
    """Returns the names that a package in `folder`, or a module inside it, binds at its top level,
    also inside `if` and `try`. They are read from the text: importing a vendor's package takes
    seconds, and may fail.
    """
    return _exported(_file(folder, module) if module else folder / "__init__.py")


def _exported(source: Path) -> frozenset[str]:
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
        return frozenset(_bound(tree.body, source.parent))
    except (OSError, SyntaxError, ValueError):
        return frozenset()


def _bound(statements: list[ast.stmt], folder: Path) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            if node.level == 1 and node.module:  # from .module import *
                yield from _exported(_file(folder, node.module))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (a.asname or a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _bound([*node.body, *node.orelse], folder)
            for handler in getattr(node, "handlers", ()):
                yield from _bound(handler.body, folder)


def _file(folder: Path, module: str) -> Path:
    """The source of a module inside a package."""
    path = module.replace(".", "/")
    package = folder / path / "__init__.py"
    return package if package.is_file() else folder / f"{path}.py"
