"""A vendor's platform over stand-ins for its device, computing on the CPU: its own class, of which
only what names a real device is replaced. `PLATFORM_DOUBLE` says whose; ranks import this, too.
"""

from __future__ import annotations

import os
import sys
import types
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e" / "plugins"))
import recorded
import torch
from vendor_doubles import device

from ds_runtime.api import DeviceInfo, hookimpl

VENDOR = os.environ["PLATFORM_DOUBLE"]
OF = import_module(f"ds_runtime_{VENDOR}.platform")
REAL = getattr(OF, f"{VENDOR.capitalize()}Platform")
ds_attention, ds_moe, ds_ops = recorded.ds_attention, recorded.ds_moe, recorded.ds_ops


class Double(REAL):
    name = "double"
    score = -1
    joining = False

    def info(self, rank=0):
        return DeviceInfo("cpu", "stand-in", "any")

    def device(self, rank=0):
        """Where tensors lie; in joining a group, the device that the platform names."""
        if self.joining:
            return types.SimpleNamespace(type=self.torch_type, index=rank)
        return torch.device("cpu")

    def communicator(self, *args):
        self.joining = True
        try:
            return super().communicator(*args)
        finally:
            self.joining = False

    def init_worker(self, rank, size, threads=None):
        if getattr(torch, "stood_in", None) != VENDOR:  # a rank's own process
            device.stand_in(VENDOR)
        super().init_worker(rank, size, threads)


@hookimpl
def ds_platform():
    return Double()
