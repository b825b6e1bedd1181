"""The ranks of tests on accelerators, here over Gloo."""

from __future__ import annotations

import pytest
import torch
from ranks_on_devices import SHARE, Rank, SumsBeside, device_of, enter_and_check

from ds_runtime_cpu.platform import CpuPlatform
from parts import mostly_slow
from rank_processes import run_ranks

REPLAYS = 10


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_ranks_take_turns_on_devices_where_they_share_them(monkeypatch, count):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    for said in ({}, {SHARE: "0"}):
        assert [device_of(rank, said) for rank in range(8)] == [*range(8)]
    shared = [device_of(rank, {SHARE: "1"}) for rank in range(8)]
    assert shared == [*range(count), *range(8)][:count] * (8 // count) + [*range(8 % count)]


def sums(own: Rank, forgotten: int | None = None) -> None:
    """A step of sums, whose results are wrong in the call `forgotten`."""
    beside = SumsBeside(own, 2)
    x, out = torch.zeros(2, 64), torch.zeros(2, 64)
    calls = []

    def step() -> None:
        out.copy_(own.comm.all_reduce(x.clone()))
        for number in range(2):
            beside.sum(number)

    def wrong(every: list[torch.Tensor]) -> torch.Tensor:
        calls.append(0)
        if len(calls) - 1 == forgotten:
            out[1, 3] += 1.0
        (parts,) = every
        assert parts.shape == (own.comm.size, 2, 64)
        assert not torch.equal(parts[0], parts[1])
        return beside.wrong() + ((out - parts.sum(0)).abs() > 1e-5).sum()

    own.check_late(step, [x], wrong, REPLAYS)
    assert len(calls) == REPLAYS


def in_turn(own: Rank) -> None:
    total, one = torch.zeros(4), torch.ones(4)

    def step() -> None:
        total.add_(own.comm.all_reduce(one.clone()))

    seen = [(number, total[0].item()) for number in own.in_turn(step, REPLAYS)]
    before = seen[0][1] - own.comm.size  # of the first run and the capture
    assert seen == [(n, before + own.comm.size * (n + 1)) for n in range(REPLAYS)]


def good(own: Rank) -> None:
    parts = own.parts(5, 3, 8)
    assert parts.shape == (own.comm.size, 3, 8)
    assert torch.equal(parts[1], own.drawn(6, 3, 8))
    assert own.platform.local_rank == own.comm.rank
    sums(own)
    in_turn(own)


def bad(own: Rank) -> None:
    sums(own, 7 if own.comm.rank == 1 else None)


@pytest.mark.parametrize("size", mostly_slow([2, 3], 1))
def test_steps_that_are_right_pass_on_every_rank(tmp_path, size):
    assert run_ranks(enter_and_check, size, tmp_path, CpuPlatform, good) == [None] * size


def test_one_wrong_value_of_one_replay_is_found(tmp_path):
    with pytest.raises(AssertionError, match=r"^rank 1: (?s:.*)1 values in 10 replays"):
        run_ranks(enter_and_check, 2, tmp_path, CpuPlatform, bad)


def numbered(rank: int, size: int, address: str, absent: int) -> tuple[int, int]:
    while rank == absent:
        torch.sum(torch.ones(1))
    return rank, size


def test_answers_come_in_the_order_of_the_ranks_that_give_any(tmp_path):
    assert run_ranks(numbered, 3, tmp_path, 1, answers=2) == [(0, 3), (2, 3)]
