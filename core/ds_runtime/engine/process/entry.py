"""How a process becomes a rank of a platform: an engine's, a kit's or a benchmark's. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ds_runtime.platform.contract import Platform


def set_environment(wanted: Mapping[str, str]) -> None:
    """Set what `Platform.process_env` says, where the user has not. To be called before torch loads
    what reads it.
    """
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def enter(platform: Platform, rank: int = 0, size: int = 1, threads: int | None = None) -> None:
    """Make this process local rank `rank` of the `size` on this machine, before any tensor exists.

    threads: of the host, as `--threads` says; None: the rank's share.
    """
    platform.local_rank = rank
    platform.init_worker(rank, size, threads)
