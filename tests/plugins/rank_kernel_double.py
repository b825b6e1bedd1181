"""What stands in place of kernels over memory that ranks share: functions of this process."""

from __future__ import annotations

import ctypes
import itertools
import logging

import pytest
import torch
from test_cuda_shared_sums import PLACE, Memory, ranks

from ds_runtime_cuda import nvlink, rank_kernels

LAUNCHED: list[tuple[int, int]] = []  # (rank, where its half begins)


class STAND:
    """memory: what ranks share. fault: what launches get wrong."""

    memory: Memory
    fault = ""


def values(address, count, dtype):
    """Memory of this process."""
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)


def exchanged(kernel, a, count):
    """The `count` values of each rank, once all have put theirs into the half of this call."""
    calls = values(a.calls, 2, torch.int64)
    at = kernel.signals + (int(calls[0]) + 1) % 2 * a.half
    assert 0 < 2 * count <= a.half
    LAUNCHED.append((PLACE.rank, at))
    values(a.peers[a.rank] + at, count, torch.bfloat16).copy_(values(a.x, count, torch.bfloat16))
    STAND.memory.shared.barrier.wait()
    return [values(peer + at, count, torch.bfloat16) for peer in a.peers[: kernel.ranks]]


def done(a):
    """The end of a launch, on every rank."""
    STAND.memory.shared.barrier.wait()
    values(a.calls, 2, torch.int64)[0] += 1


def halves():
    """Where rank 0's launches put their values, which take turns."""
    found = [at for rank, at in LAUNCHED if rank == 0]
    assert all(a != b for a, b in itertools.pairwise(found))
    return found


def everywhere(double, size, run, fault="", capability=(9, 0), before=None):
    """What `run` returns on each rank. double: (class of modules, their launch)."""
    with pytest.MonkeyPatch.context() as patch:
        module, launch = double
        patch.setattr(rank_kernels.nvrtc, "Module", module)
        patch.setattr(rank_kernels.nvrtc, "launch", launch)
        patch.setattr(nvlink, "_capability", lambda device: capability)
        STAND.fault = fault
        LAUNCHED.clear()
        made = Memory.__init__

        def remember(self, *given):
            made(self, *given)
            STAND.memory = self

        patch.setattr(Memory, "__init__", remember)
        return ranks(size, patch, run, fault, before)


def check_refused(caplog, double, ask, fault, said):
    """All ranks have none, and rank 0 alone says why."""
    with caplog.at_level(logging.WARNING):
        assert everywhere(double, 4, ask, fault) == [None] * 4
    (record,) = caplog.records
    assert record.getMessage().startswith(said)


def check_unserved(caplog, double, ask):
    """Older devices and numbers of ranks without shared memory have none, and nobody is warned."""
    assert everywhere(double, 2, ask, capability=(8, 0)) == [None] * 2
    assert everywhere(double, 3, ask) == [None] * 3
    assert not caplog.records
