"""Cores of the host that one process may take for itself."""

from __future__ import annotations

import os


def cores_per_device() -> int:
    """This process's cores, shared out among the devices that it sees: every other one may have a
    process like it. At least one.
    """
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    return max(1, cores // max(1, devices))
