"""A kernel's sums with the add and the norm behind them: what it is given, and who sets it up.

In place of the kernel stands what csrc/normed_sum.cu says that it does, at the same addresses.
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

from ds_runtime.ops.reference import norm
from ds_runtime.ops.reference.matrices.linear import quantize_group
from ds_runtime_cuda import normed_sum

KINDS = {0: torch.bfloat16, 1: torch.float32}


class Kernel:
    """Of one rank's module."""

    def __init__(self, source, defines):
        assert source == "normed_sum.cu" and defines["ARGS"] == ctypes.sizeof(
            normed_sum._NormedSumArgs
        )
        self.ranks, self.signals = defines["RANKS"], defines["SIGNALS"]

    def function(self, name):
        return self, name


def launch(function, grid, threads, shared, a):
    kernel, name = function
    count = a.rows * a.width
    assert shared == 0
    assert threads % 32 == 0 and threads <= 1024 and grid[0] <= min(a.rows, 128)
    held = 8 * threads * (1 if name == "normed_sum" else 2)
    assert a.width <= held < a.width + 8 * 32 * (1 if name == "normed_sum" else 2)
    out = a.codes or a.normed
    for address in (a.x, a.residual, a.weight, out, a.summed, *a.peers[: kernel.ranks]):
        assert address % 16 == 0
    total = torch.zeros(count)
    for part in exchanged(kernel, a, count):
        total += part.float()
    if STAND.fault == "sum":
        total += 1
    weight = values(a.weight, a.width, KINDS[a.wide])
    old = values(a.residual, count, torch.bfloat16).view(-1, a.width)
    x = total.to(torch.bfloat16).view(-1, a.width)
    normed, summed = norm.add_rms_norm(x, old, weight, a.eps)
    if STAND.fault == "norm":
        normed = normed * 2
    if a.codes:
        codes, scale = quantize_group(normed, 128, bool(a.powers))
        values(a.codes, count, torch.uint8).copy_(codes.view(torch.uint8).view(-1))
        held = values(a.scale, a.width // 128 * a.pitch, torch.float32).view(-1, a.pitch)
        held[:, : a.rows] = scale.T * (2 if STAND.fault == "scale" else 1)
    else:
        values(a.normed, count, torch.bfloat16).copy_(normed.view(-1))
    values(a.summed, count, torch.bfloat16).copy_(summed.view(-1))
    rank_kernel_double.done(a)


DOUBLE = Kernel, launch
everywhere = partial(rank_kernel_double.everywhere, DOUBLE)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([2, 4, 8]),
    st.lists(st.integers(0, 200), min_size=1, max_size=3),
    st.sampled_from([8, 264, 7168, 8192, 8200, 16384]),
    st.booleans(),
)
def test_it_is_add_rms_norm_of_the_parts_in_order(size, calls, width, wide):
    calls = [min(rows, 60000 // width) for rows in calls]
    draw = torch.Generator().manual_seed(width)
    parts = [(torch.randn(60000, generator=draw) * 4.0**r).bfloat16() for r in range(size)]
    residual = torch.randn(60000, generator=draw).bfloat16()
    weight = torch.randn(width, generator=draw).to(KINDS[wide])

    def run(comm):
        made = comm.normed_sum(120000)
        found = []
        for rows in calls:
            x, old = (t[: rows * width].view(rows, width) for t in (parts[comm.rank], residual))
            found.append([*made(x.clone(), old.clone(), weight, 1e-6)])
            for powers in (False, True) if width % 128 == 0 else ():
                found[-1] += made.quantized(x.clone(), old.clone(), weight, 1e-6, powers)
        return found

    for found in everywhere(size, run):
        for rows, (normed, summed, *coded) in zip(calls, found, strict=True):
            total = torch.zeros(rows, width)
            for part in parts:
                total = total + part[: rows * width].view(rows, width).float()
            old = residual[: rows * width].view(rows, width)
            want = norm.add_rms_norm(total.bfloat16(), old, weight, 1e-6)
            assert torch.equal(normed, want[0]) and torch.equal(summed, want[1])
            for powers, begin in enumerate(range(0, len(coded), 3)):
                codes, scale = quantize_group(want[0], 128, bool(powers))
                assert torch.equal(coded[begin].view(torch.uint8), codes.view(torch.uint8))
                assert torch.equal(coded[begin + 1], scale)
                assert torch.equal(coded[begin + 2], want[1])
    each = 3 if width % 128 == 0 else 1
    assert len(halves()) == 4 + each * sum(rows > 0 for rows in calls)  # the checks; no empty ones


def test_rows_that_are_strided_or_not_aligned_are_copied():
    def run(comm):
        flat, wide = torch.ones(17, dtype=torch.bfloat16), torch.ones(2, 16, dtype=torch.bfloat16)
        made, weight = comm.normed_sum(1024), torch.ones(9, dtype=torch.bfloat16)[1:]
        return made(flat[1:].view(2, 8), wide[:, ::2], weight, 1e-6), flat, wide

    for (normed, summed), flat, wide in everywhere(2, run):
        assert summed.tolist() == [[3.0] * 8] * 2 and normed.tolist() == [[1.0] * 8] * 2
        assert bool((flat == 1).all()) and bool((wide == 1).all())


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("empty", "RuntimeError: no empty here"),
        ("elsewhere", "RuntimeError: memory to share does not lie at the beginning"),
        ("sum", "RuntimeError: call 0: 512 of 512 sums are wrong"),
        ("norm", "RuntimeError: call 0: a norm is off by"),
        ("scale", "RuntimeError: a norm is quantised otherwise than by torch"),
    ],
)
def test_ranks_that_cannot_compose_it_all_alike(caplog, fault, why):
    said = f"the add and the norm after sums are kernels of their own: {why}"
    check_refused(caplog, DOUBLE, lambda comm: comm.normed_sum(1024), fault, said)


def test_older_devices_other_links_and_second_engines_have_none(caplog):
    ask = lambda comm: comm.normed_sum(1024)  # noqa: E731
    check_unserved(caplog, DOUBLE, ask)
    assert everywhere(2, ask, before=[1, 0]) == [None] * 2
