"""Ranks of tests on accelerators: their devices, their values, and replays to which they come late.

Each rank has a device of its own. With DS_TEST_RANKS_SHARE_DEVICES=1 they take turns on those that
are here. Libraries refuse that unless told: NCCL from 2.31 wants NCCL_MULTI_RANK_GPU_ENABLE=1, and
torch's shared memory wants TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ds_runtime.engine.process.entry import enter
from ds_runtime.platform.contract import Communicator, GraphBackend, Platform
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from rank_processes import run_ranks

SHARE = "DS_TEST_RANKS_SHARE_DEVICES"
LIMIT = 240.0  # seconds until every rank has answered
REPLAYS = 1000
BUSY = 4096  # rows of a product that keeps a device busy


def device_of(rank: int, environ: Mapping[str, str] = os.environ) -> int:
    """The index of the device that a rank computes on."""
    if environ.get(SHARE) != "1":
        return rank
    return rank % max(1, torch.accelerator.device_count())


@dataclass(frozen=True)
class Rank:
    """What a rank of a test computes with."""

    platform: Platform
    comm: Communicator
    device: torch.device
    backend: GraphBackend

    def drawn(
        self, seed: int, rows: int, width: int, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """[rows, width]: the same on every rank."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(rows, width, generator=draw).to(dtype).to(self.device)

    def parts(
        self, seed: int, rows: int, width: int, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """[ranks, rows, width]: each rank's part, which all of them know."""
        return torch.stack(
            [self.drawn(seed + rank, rows, width, dtype) for rank in range(self.comm.size)]
        )

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """The replay of a step, which has run once before."""
        step()
        self.platform.synchronize()
        return self.backend.capture(step)

    def check_late(
        self,
        step: Callable[[], None],
        xs: Sequence[Tensor],
        wrong: Callable[[list[Tensor]], Tensor],
        replays: int = REPLAYS,
    ) -> None:
        """Replays of a step with new values in `xs`. In some of them this rank comes late.

        wrong: from what is in each of `xs` on all ranks, how many values of the replay are wrong,
        as a number on the device.
        """
        replay, draw = self.captured(step), random.Random(self.comm.rank)
        found = torch.zeros((), dtype=torch.int64, device=self.device)
        busy = torch.ones(BUSY, BUSY, device=self.device)
        torch.manual_seed(self.comm.rank)
        for _ in range(replays):
            for x in xs:
                x.normal_()
            every = [self.comm.gather_rows(x.unsqueeze(0)) for x in xs]
            chance = draw.random()
            if chance < 0.1:
                time.sleep(draw.random() * 3e-3)
            elif chance < 0.2:
                busy @ busy  # this device comes late, its host does not
            replay()
            found += wrong(every)
        assert not int(found), f"{int(found)} values in {replays} replays"

    def in_turn(self, step: Callable[[], None], replays: int = REPLAYS) -> Iterator[int]:
        """Numbers of replays with nothing between them: ranks are up to one call ahead of each
        other."""
        replay, draw = self.captured(step), random.Random(self.comm.rank)
        for number in range(replays):
            replay()
            if draw.random() < 0.02:
                time.sleep(draw.random() * 2e-3)
            yield number


class SumsBeside:
    """Sums of all kinds in the same step as what a test is about."""

    def __init__(self, rank: Rank, count: int) -> None:
        self._size, self._device = rank.comm.size, rank.device
        self._kinds = (rank.comm.all_reduce, *rank.comm.fast_sums(1 << 20).values())
        self._found = torch.zeros(count, 64, dtype=torch.bfloat16, device=rank.device)

    def sum(self, number: int) -> None:
        """The sum with this number of a step."""
        ones = torch.ones(64, dtype=torch.bfloat16, device=self._device)
        self._found[number].copy_(self._kinds[number % len(self._kinds)](ones))

    def wrong(self) -> Tensor:
        """How many values the last step got wrong; they are forgotten."""
        count = (self._found != self._size).sum()
        self._found.zero_()
        return count


def best_platform() -> Platform:
    return select_platform(load_plugins())[0]


def check_ranks(folder: Path, size: int, check: Callable[[Rank], None]) -> None:
    """`check` on every rank. Skips where there are fewer devices, or their links allow no such
    sums."""
    platform = best_platform()
    try:
        links = [platform.info(device_of(rank)).link for rank in range(size)]
    except Exception as e:
        pytest.skip(f"{size} devices are needed: {e}")
    if not all(size in platform.fast_sums.get(link, ()) for link in links):
        pytest.skip(f"no fast sums of {size} ranks of {platform.name} over {set(links)}")
    run_ranks(enter_and_check, size, folder, best_platform, check, limit=LIMIT)


def enter_and_check(
    rank: int,
    size: int,
    address: str,
    made: Callable[[], Platform],
    check: Callable[[Rank], None],
) -> None:
    """`check` of this process as one rank of a platform."""
    platform, here = made(), device_of(rank)
    enter(platform, here, size)
    comm = platform.communicator(rank, size, address, LIMIT / 2)
    with torch.inference_mode():
        check(Rank(platform, comm, platform.device(here), platform.graph_backend(here)))
    comm.close()
