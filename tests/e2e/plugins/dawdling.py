"""The CPU as a platform of which one rank computes slowly: `$DAWDLES` is its number. It pauses in
front of each sum. Ranks other than 0, which is the tests' process, do in recorded steps, too.
"""

from __future__ import annotations

import multiprocessing
import os
import time

import torch

from ds_runtime.api import hookimpl
from ds_runtime_cpu import collectives, native
from ds_runtime_cpu.collectives import HostCommunicator
from ds_runtime_cpu.platform import CpuPlatform

PAUSE = 2e-3  # seconds


class Dawdling(HostCommunicator):
    def all_reduce(self, x):
        if self.rank == int(os.environ["DAWDLES"]) and not native.records():
            time.sleep(PAUSE)
        return super().all_reduce(x)


def _run(x, name, group, run=collectives._run):
    if collectives._groups[group].rank == int(os.environ["DAWDLES"]) and name == "all_reduce":
        time.sleep(PAUSE)
    return run(x, name, group)


if multiprocessing.parent_process() is not None:
    collectives._run = _run


class DawdlingPlatform(CpuPlatform):
    name = "dawdling"
    score = -1

    def communicator(self, rank, size, init_method, timeout=600.0):
        torch.set_num_threads(1)
        return Dawdling("gloo", rank, size, init_method, timeout)


@hookimpl
def ds_platform():
    return DawdlingPlatform()
