"""A kernel's gather of logits: what it is given, and who sets it up.

In place of the kernel stands what csrc/gather_logits.cu says that it does, at the same addresses.
"""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import rank_kernel_double
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_kernel_double import STAND, check_refused, check_unserved, exchanged, halves, values

from ds_runtime_cuda import gather_logits


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


def launch(kernel, grid, threads, shared, a):
    count = a.rows * a.each
    assert a.each % 8 == 0 and shared == 0
    assert a.width <= kernel.ranks * a.each and a.pitch >= a.width and a.pitch % 4 == 0
    assert threads % 32 == 0 and threads <= 1024 and 0 < grid[0] <= 128 and grid[1] == 1
    assert threads * (grid[0] - 1) < count // 8, "a block without work"
    for address in (a.x, a.out, *a.peers[: kernel.ranks]):
        assert address % 16 == 0
    parts = exchanged(kernel, a, count)
    if STAND.fault == "order":
        parts.reverse()
    whole = torch.cat([part.view(a.rows, a.each) for part in parts], 1).float()[:, : a.width]
    held = values(a.out, (a.rows - 1) * a.pitch + a.width, torch.float32)
    torch.as_strided(held, (a.rows, a.width), (a.pitch, 1)).copy_(whole)
    rank_kernel_double.done(a)


DOUBLE = Kernel, launch
everywhere = partial(rank_kernel_double.everywhere, DOUBLE)


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
    assert len(halves()) == 3 + sum(rows > 0 for rows in calls)  # the checks; no empty ones


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("empty", "RuntimeError: no empty here"),
        ("elsewhere", "RuntimeError: memory to share does not lie at the beginning"),
        ("order", "RuntimeError: call 0: "),
    ],
)
def test_ranks_that_cannot_gather_by_the_library_all_alike(caplog, fault, why):
    said = f"logits of every size are gathered by NCCL: {why}"
    check_refused(caplog, DOUBLE, lambda comm: comm.gather_logits(1024), fault, said)


def test_older_devices_and_other_links_have_none(caplog):
    check_unserved(caplog, DOUBLE, lambda comm: comm.gather_logits(1024))
