"""Which tasks compilers did during loading before, so that a start with full caches skips them.

`~/.cache/ds-runtime/compiled` has a file for each set of tasks. Its name is a digest of the tasks,
of the versions of all that is installed, compilers among it, and of the files of the plugins that
do them. It holds the folders in which compilers kept what they made, their inodes, and how much is
in each: where one is gone, or holds less, all is compiled again. Where nothing can be written,
nothing is skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

Folders = Mapping[str, Sequence[int]]
"""Folders, and of each its inode and how many entries it has."""


def found_in(folders: Iterable[Path]) -> dict[str, list[int]]:
    """Of those that exist."""
    found = dict[str, list[int]]()
    for folder in folders:
        with contextlib.suppress(OSError):
            found[str(folder)] = [folder.stat().st_ino, len(os.listdir(folder))]
    return found


class CompileRecord:
    """Of one set of tasks. tasks: in any order, as `repr` tells them; modules: that do them."""

    def __init__(self, tasks: Iterable[object], modules: Iterable[str]) -> None:
        digest = hashlib.sha256(torch.__version__.encode())
        for text in (*_installed(), *sorted(map(repr, tasks))):
            digest.update(text.encode())
        for package in sorted({module.partition(".")[0] for module in modules}):
            _add_files(digest, package)
        self._name = digest.hexdigest()[:32]

    @property
    def _path(self) -> Path:
        return Path.home() / ".cache" / "ds-runtime" / "compiled" / self._name

    def holds(self) -> bool:
        """Whether all was compiled, and is where it was kept."""
        try:
            folders: Folders = json.loads(self._path.read_text())
            now = found_in(map(Path, folders))
            return all(
                name in now and now[name][0] == inode and now[name][1] >= count
                for name, (inode, count) in folders.items()
            )
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError):  # absent or damaged
            return False

    def write(self, folders: Folders) -> None:
        """All was compiled, into these folders."""
        with contextlib.suppress(OSError, RuntimeError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(folders))


def _installed() -> list[str]:
    """`NAME-VERSION.dist-info` of each distribution."""
    places = (place for place in map(Path, sys.path) if place.is_dir())
    return sorted({found.name for place in places for found in place.glob("*.dist-info")})


def _add_files(digest: hashlib._Hash, package: str) -> None:
    """The contents of a package's files, or of a module's one."""
    spec = find_spec(package)
    places = [] if spec is None else (spec.submodule_search_locations or [spec.origin or ""])
    for place in map(Path, places):
        files = sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
        for file in files:
            if "__pycache__" not in file.parts and file.is_file():
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
