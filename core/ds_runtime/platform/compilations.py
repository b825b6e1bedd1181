"""Kernels that compilers made in this process, as the plugins that call them tell.

Once an engine serves, each one kept requests waiting: it is counted, and told in the log.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from string import hexdigits

_LOG = logging.getLogger(__name__)
_DIGEST = 16  # characters, at least
_LOCK = threading.Lock()
_COUNTS: Counter[tuple[str, str]] = Counter()
_SERVING = threading.Event()
_KEPT: dict[Path, str] = {}
_SEEN: dict[Path, tuple[int, frozenset[str]]] = {}


def compiled(compiler: str, kernel: str, seconds: float | None = None, shape: str = "") -> None:
    """A compiler has made a kernel that was in no cache. Plugins call this after every
    compilation, from any thread.

    kernel: its name, one of few. shape: what it was made for, for the log. seconds: how long the
    compiler took, where that is known.
    """
    with _LOCK:
        _COUNTS[compiler, kernel] += 1
    if _SERVING.is_set():
        _LOG.warning(
            "%s compiled %s while serving%s%s",
            compiler,
            kernel,
            "" if seconds is None else f", which took {seconds:.2f} s",
            f": {shape}" if shape else "",
        )


def kept_in(compiler: str, folder: str | os.PathLike[str], tells: bool = True) -> None:
    """A compiler of this process keeps what it makes in this folder. Plugins call this before it
    makes anything.

    tells: `compiled` is called for what it makes; else each new folder in this one is a kernel
    `name.digest` that it made, and is counted.
    """
    path = Path(folder)
    with _LOCK:
        _KEPT[path] = compiler
        if not tells:
            _SEEN.setdefault(path, _entries(path))


def folders() -> list[Path]:
    """Where compilers of this process keep what they make."""
    with _LOCK:
        return sorted(_KEPT)


def _entries(folder: Path) -> tuple[int, frozenset[str]]:
    """When a folder changed last, and the folders in it."""
    try:
        changed = folder.stat().st_mtime_ns
        with os.scandir(folder) as found:
            return changed, frozenset(one.name for one in found if one.is_dir())
    except OSError:  # nothing was made yet
        return 0, frozenset()


def _look() -> None:
    """Count what compilers made that do not tell."""
    with _LOCK:
        watched = list(_SEEN.items())
    for folder, (changed, names) in watched:
        try:
            if folder.stat().st_mtime_ns == changed:
                continue
        except OSError:
            continue
        now = _entries(folder)
        with _LOCK:
            _SEEN[folder] = now
        for name in sorted(now[1] - names):
            compiled(_KEPT[folder], _named(name))


def _named(entry: str) -> str:
    """The kernel's name in `kernel.NAME.DIGEST`, `NAME.DIGEST`, `NAME` or `DIGEST`."""
    name = entry.removeprefix("kernel.").partition(".")[0]
    return "kernel" if len(name) >= _DIGEST and not set(name) - set(hexdigits) else name


def heard(compiler: str, kernel: str, count: int) -> None:
    """This many were compiled by a process that this one started."""
    with _LOCK:
        _COUNTS[compiler, kernel] += count


def serving(now: bool) -> None:
    """Whether from now on requests wait for what is compiled: an engine serves, or one starts."""
    if now:
        _SERVING.set()
    else:
        _SERVING.clear()


def counted() -> Mapping[tuple[str, str], int]:
    """How many kernels were compiled since the process began, by compiler and kernel."""
    _look()
    with _LOCK:
        return dict(_COUNTS)


def num_compiled() -> int:
    """How many kernels were compiled since the process began."""
    _look()
    with _LOCK:
        return _COUNTS.total()
