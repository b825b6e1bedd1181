"""Kernels that compilers made in this process, as the plugins that call them tell.

Once an engine serves, each one kept requests waiting: it is counted, and told in the log.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

_LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()
_COUNTS: Counter[tuple[str, str]] = Counter()
_SERVING = threading.Event()


def compiled(compiler: str, kernel: str, seconds: float, shape: str = "") -> None:
    """A compiler has made a kernel that was in no cache. Plugins call this
    behind every compilation, from any thread.

    kernel: its name, one of few. shape: what it was made for, for the log. seconds: how long the
    compiler took.
    """
    with _LOCK:
        _COUNTS[compiler, kernel] += 1
    if _SERVING.is_set():
        _LOG.warning(
            "%s compiled %s while serving, which took %.2f s%s",
            compiler,
            kernel,
            seconds,
            f": {shape}" if shape else "",
        )


def heard(compiler: str, kernel: str, count: int) -> None:
    """So many were compiled by a process that this one started."""
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
    with _LOCK:
        return dict(_COUNTS)


def num_compiled() -> int:
    """How many kernels were compiled since the process began."""
    with _LOCK:
        return _COUNTS.total()
