"""A kernel's gather of logits: what it is given, and who sets it up.

In place of the kernel stands what csrc/gather_logits.cu says that it does, at the same addresses.
"""

from __future__ import annotations

import ctypes
import itertools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_normed_sum import values
from test_cuda_shared_sums import PLACE, Memory, ranks

from ds_runtime_cuda import gather_logits, nvlink, rank_kernels


class STAND:
    memory: Memory
    fault = ""


class Kernel:
    """Of one rank's module."""

    def __init__(self, source, defines):
        assert source == "gather_logits.cu"
        assert defines["ARGS"] == ctypes.sizeof(gather_logits._GatherLogitsArgs)
        self.ranks, self.signals = defines["RANKS"], defines["SIGNALS"]
        assert self.signals == 8 * 8 * defines["BLOCKS"]

    def function(self, name):
        assert name == "gather_logits"
        return self


LAUNCHED: list[tuple] = []  # (rank, where its half begins)


def launch(kernel, grid, threads, shared, a):
    calls, count = values(a.calls, 2, torch.int64), a.rows * a.each
    at = kernel.signals + (int(calls[0]) + 1) % 2 * a.half
    assert 0 < 2 * count <= a.half and a.each % 8 == 0 and shared == 0
    assert a.width <= kernel.ranks * a.each and a.pitch >= a.width and a.pitch % 4 == 0
    assert threads % 32 == 0 and threads <= 1024 and 0 < grid[0] <= 128 and grid[1] == 1
    assert threads * (grid[0] - 1) < count // 8, "a block without work"
    for address in (a.x, a.out, *a.peers[: kernel.ranks]):
        assert address % 16 == 0
    LAUNCHED.append((PLACE.rank, at))
    values(a.peers[a.rank] + at, count, torch.bfloat16).copy_(values(a.x, count, torch.bfloat16))
    STAND.memory.shared.barrier.wait()
    parts = [values(p + at, count, torch.bfloat16) for p in a.peers[: kernel.ranks]]
    if STAND.fault == "order":
        parts.reverse()
    whole = torch.cat([part.view(a.rows, a.each) for part in parts], 1).float()[:, : a.width]
    held = values(a.out, (a.rows - 1) * a.pitch + a.width, torch.float32)
    torch.as_strided(held, (a.rows, a.width), (a.pitch, 1)).copy_(whole)
    STAND.memory.shared.barrier.wait()
    calls[0] += 1


def everywhere(size, run, fault="", capability=(9, 0)):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_kernels.nvrtc, "Module", Kernel)
        patch.setattr(gather_logits.nvrtc, "launch", launch)
        patch.setattr(nvlink, "_capability", lambda device: capability)
        STAND.fault = fault
        LAUNCHED.clear()
        made = Memory.__init__

        def remember(self, *given):
            made(self, *given)
            STAND.memory = self

        patch.setattr(Memory, "__init__", remember)
        return ranks(size, patch, run, fault)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([2, 4, 8]),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.sampled_from([8, 24, 1000, 16160]),
    st.integers(0, 7),
    st.booleans(),
)
def test_it_is_the_parts_side_by_side(size, calls, each, spare, strided):
    calls = [min(rows, 60000 // each) for rows in calls]
    draw = torch.Generator().manual_seed(each)
    parts = [torch.randn(60000, generator=draw).bfloat16() for _ in range(size)]
    width = size * each - spare

    def run(comm):
        made, found = comm.gather_logits(120000), []
        for rows in calls:
            x = parts[comm.rank][: rows * each].view(rows, each)
            out = torch.full((rows + 2, width), -1.0)
            made(x.T.contiguous().T if strided else x.clone(), out[1:-1])
            found.append(out)
        return found

    for found in everywhere(size, run):
        for rows, out in zip(calls, found, strict=True):
            want = torch.cat([part[: rows * each].view(rows, each) for part in parts], 1).float()
            assert torch.equal(out[1:-1], want[:, :width]) and bool((out[[0, -1]] == -1).all())
    halves = [at for rank, at in LAUNCHED if rank == 0]
    assert all(a != b for a, b in itertools.pairwise(halves))  # they take turns
    assert len(halves) == 3 + sum(rows > 0 for rows in calls)  # the checks; no empty ones


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("empty", "RuntimeError: no empty here"),
        ("elsewhere", "RuntimeError: memory to share does not lie at the beginning"),
        ("order", "RuntimeError: call 0: "),
    ],
)
def test_ranks_that_cannot_gather_by_the_library_all_alike(caplog, fault, why):
    with caplog.at_level(logging.WARNING):
        assert everywhere(4, lambda comm: comm.gather_logits(1024), fault) == [None] * 4
    (said,) = caplog.records  # of rank 0 alone
    head = "logits of every size are gathered by NCCL: "
    assert said.getMessage().startswith(head + why)


def test_older_devices_and_other_links_have_none(caplog):
    ask = lambda comm: comm.gather_logits(1024)  # noqa: E731
    assert everywhere(2, ask, capability=(8, 0)) == [None] * 2
    assert everywhere(3, ask) == [None] * 3  # ranks
    assert not caplog.records
