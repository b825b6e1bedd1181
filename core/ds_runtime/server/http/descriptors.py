"""File descriptors: as many as the user may have, checked at the start, and what is left."""

from __future__ import annotations

import contextlib
import os
import resource

from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError

_OWN, _ENGINE, _RANK = 25, 13, 2  # of a server, of each engine and of each of its ranks here
_FILES = 64  # that are opened and closed again
_LEAST = 16  # connections
_CROWD = 32, 8192  # beyond those, at least and at most: a burst, until its requests are read
_MOST = 1 << 20  # some systems' limit has no end, and some libraries walk through all below it


def raise_limit() -> tuple[int, int]:
    """Lets this process, and those that it starts, open as many files as their user may.

    Returns the limit before, and the one that now holds.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if before != resource.RLIM_INFINITY and before < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS says infinity and means less
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _finite(before), limit()


def limit() -> int:
    """Descriptors that this process may have: their numbers are below it."""
    return _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def check_limit(config: EngineConfig) -> None:
    """Raises ConfigError where a server could not accept connections for want of descriptors."""
    ranks = config.tp // config.nnodes
    needed = _OWN + config.replicas * (_ENGINE + ranks * _RANK) + _FILES + _CROWD[0] + _LEAST
    if (allowed := limit()) < needed:
        raise ConfigError(
            f"limit of open files {allowed}: serve needs at least {needed}: raise it, as by "
            f"ulimit -n {max(1024, needed)}, or by LimitNOFILE= of a systemd unit"
        )


def connections() -> tuple[int, int]:
    """(connections that fit, how many more may be accepted to refuse them), from the limit and from
    what is open now. Raises the limit first.
    """
    raise_limit()
    free = limit() - _open_now() - _FILES
    crowd = min(max(_CROWD[0], free // 3), _CROWD[1])
    return max(_LEAST, free - crowd), crowd


def _finite(value: int) -> int:
    return _MOST if value == resource.RLIM_INFINITY else value


def _open_now() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:  # a sandbox without it
        return _OWN + _ENGINE + _RANK
