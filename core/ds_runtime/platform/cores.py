"""Cores of a host: those that this process may use, and threads that they can mean."""

from __future__ import annotations

import os
import sys
import threading

from ds_runtime.errors import ConfigError

_THREADS = 64  # per rank are fine on the smallest machine
_LATER = 10  # niceness of work that nobody's token waits for


def cores() -> int:
    """All that it may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def cores_per_device() -> int:
    """This process's share of the cores, if each visible device has a process like it."""
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    return max(1, cores() // max(1, devices))


def check_threads(wanted: int | None, of: int = 0, machine: str = "this machine") -> None:
    """Raise ConfigError for `--threads` that no machine can mean: thread libraries crash on them
    without a word. of: its cores, 0 for this one's. machine: as the sentence names it.
    """
    of = of or os.cpu_count() or 1
    if wanted is not None and wanted > (most := max(_THREADS, 4 * of)):
        raise ConfigError(
            f"--threads {wanted}: at most {most} per rank; {machine} has {of} cores, and more "
            "threads than cores are slower"
        )


def work_behind() -> None:
    """This thread, and those that it starts, take what others leave of the cores, where the system
    knows that of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LATER)
