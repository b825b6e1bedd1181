"""Cores of the host that this process may use."""

from __future__ import annotations

import os
import sys
import threading

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


def work_behind() -> None:
    """This thread, and those that it starts, take what others leave of the cores, where the system
    knows that of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LATER)
