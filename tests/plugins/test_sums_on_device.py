"""All-reduces in memory that ranks share, on the accelerators that are here: of 2 and of 4 ranks,
op by op and captured, with ranks that come late.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Mapping

import pytest
import torch
from ranks_on_devices import check_ranks
from torch import Tensor

from ds_runtime.engine.process.entry import enter
from ds_runtime.parallel.sums.by_size import BySize
from ds_runtime.parallel.sums.kinds import FAST, LIBRARY, SumSizes
from ds_runtime.platform.contract import Communicator, GraphBackend, Platform
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform

pytestmark = pytest.mark.gpu
ROWS, WIDTH, REPLAYS = (1, 2, 3, 7, 8, 32, 37, 64, 100, 128, 256, 511, 512), 7168, 1000
STEP = (1, 37, 512, 8, 300)  # rows of the sums of a captured step
LIMITS = SumSizes((("one_shot", 8 * WIDTH * 2), ("two_shot", 300 * WIDTH * 2)))


Sums = Mapping[str, Callable[[Tensor], Tensor]]


def part(rank, rows, dtype, device, seed=0) -> Tensor:
    """What any rank knows of another's."""
    draw = torch.Generator().manual_seed(1000 * seed + 10 * rows + rank)
    return torch.randn(rows, WIDTH, generator=draw).to(dtype).to(device)


def off(comm: Communicator, found: Tensor, parts: Tensor) -> Tensor:
    """How many values are further from the sum than rounding allows, and how many differ from rank
    0's bits; on the device."""
    size = found.element_size()
    error = (found.double() - parts.double().sum(0)).abs()
    bound = parts.double().abs().sum(0) * comm.size * torch.finfo(found.dtype).eps
    every = comm.gather_rows(found.reshape(1, -1)).view(torch.int32 if size == 4 else torch.int16)
    return (error > bound).sum() + (every != every[0]).sum()


def eager(comm: Communicator, device, sums: Sums) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for rows in ROWS:
            parts = torch.stack([part(r, rows, dtype, device) for r in range(comm.size)])
            for kind, sum_up in sums.items():
                x = parts[comm.rank].clone()
                found = sum_up(x)
                assert torch.equal(x, parts[comm.rank]), f"{kind}: what was given is changed"
                wrong = int(off(comm, found, parts))
                assert not wrong, f"{kind} of {rows} rows of {dtype}: {wrong} values"


def captured(platform: Platform, comm: Communicator, device, backend: GraphBackend) -> None:
    """A step of sums of all kinds, whose results are the next one's input, replayed with delays."""
    group = BySize(comm, LIMITS)
    kinds = {LIMITS.kind(rows * WIDTH * 2) for rows in STEP}
    assert kinds == {*FAST, LIBRARY}
    xs = [torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=device) for rows in STEP]
    outs = [torch.empty_like(x) for x in xs]

    def step() -> None:
        for x, out in zip(xs, outs, strict=True):
            out.copy_(group.all_reduce(x.clone()))

    step()
    platform.synchronize()
    replay = backend.capture(step)
    draw, wrong = random.Random(comm.rank), torch.zeros((), dtype=torch.int64, device=device)
    busy = torch.ones(4096, 4096, device=device)
    torch.manual_seed(comm.rank)
    for _ in range(REPLAYS):
        for x in xs:
            x.normal_()
        every = [comm.gather_rows(x.unsqueeze(0)) for x in xs]
        chance = draw.random()
        if chance < 0.1:
            time.sleep(draw.random() * 3e-3)
        elif chance < 0.2:
            busy @ busy  # this device comes late, its host does not
        replay()
        for out, parts in zip(outs, every, strict=True):
            wrong += off(comm, out, parts)
    assert not int(wrong), f"{int(wrong)} values in {REPLAYS} replays"


def rank_of(rank, size, address, results) -> None:
    try:
        platform, _ = select_platform(load_plugins())
        enter(platform, rank, size)
        comm, device = platform.communicator(rank, size, address, 120.0), platform.device(rank)
        backend = platform.graph_backend(rank)
        with torch.inference_mode():
            sums = comm.fast_sums(max(ROWS) * WIDTH * 4)
            assert [*sums] == [*FAST], f"this platform's ranks have {[*sums]}; the log says why"
            eager(comm, device, sums)
            captured(platform, comm, device, backend)
        comm.close()
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())


@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_every_kind_and_size(tmp_path, size):
    check_ranks(tmp_path, size, rank_of)
