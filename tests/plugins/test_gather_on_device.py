"""The head's gather in one kernel, on the accelerators that are here: of 2 and of 4 ranks, op by op
and captured, with ranks that come late.
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
from ds_runtime.platform.contract import Communicator, GraphBackend, Platform
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform

pytestmark = pytest.mark.gpu
ROWS = (0, 1, 2, 3, 7, 8, 32, 37, 64, 127, 128, 129, 256, 511, 512)
EACH, REPLAYS = 16160, 1000  # values of a part: V3's of eight ranks
SHAPES = [(rows, EACH, 0) for rows in ROWS] + [(1, 8, 0), (3, 8, 7), (5, 64640, 0), (9, 4096, 13)]
STEP = ((1, EACH), (37, 4096), (512, 2048), (8, EACH), (1, 8), (128, EACH))  # of a captured step


Gather = Callable[[Tensor, Tensor], None]
Sums = Mapping[str, Callable[[Tensor], Tensor]]


def parts_of(comm: Communicator, device, rows, n, seed) -> list[Tensor]:
    """What any rank knows of another's."""
    found = []
    for rank in range(comm.size):
        draw = torch.Generator().manual_seed(seed + rank)
        found.append(torch.randn(rows, n, generator=draw).bfloat16().to(device))
    return found


def eager(comm: Communicator, device, gather: Gather) -> None:
    for rows, n, spare in SHAPES:
        parts, width = parts_of(comm, device, rows, n, rows + n), comm.size * n - spare
        around = torch.full((rows + 2, width), -1.0, device=device)
        # An odd width leaves rows without alignment, which `out` may have.
        gather(parts[comm.rank].clone(), around[1:-1])
        assert torch.equal(around[1:-1], torch.cat(parts, 1).float()[:, :width]), (rows, n, spare)
        assert bool((around[[0, -1]] == -1).all()), "what lies around is changed"
    strided = torch.zeros(2, 128, dtype=torch.bfloat16, device=device)[:, ::2].fill_(comm.rank)
    out = torch.empty(64 * comm.size, 2, device=device).T
    gather(strided, out)
    want = torch.arange(comm.size, device=device).repeat_interleave(64).float()
    assert torch.equal(out, want.expand(2, -1))


def captured(
    platform: Platform,
    comm: Communicator,
    device,
    backend: GraphBackend,
    gather: Gather,
    sums: Sums,
) -> None:
    """A step of several, between which others sum, too, replayed with delays and new values."""
    xs = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in STEP]
    outs = [torch.zeros(rows, comm.size * n, device=device) for rows, n in STEP]
    others = torch.zeros(len(STEP), 64, dtype=torch.bfloat16, device=device)

    def step() -> None:
        for n, (x, out) in enumerate(zip(xs, outs, strict=True)):
            gather(x, out)
            other = (comm.all_reduce, *sums.values())[n % (1 + len(sums))]
            others[n].copy_(other(torch.ones(64, dtype=torch.bfloat16, device=device)))

    step()
    platform.synchronize()
    replay = backend.capture(step)
    draw, wrong = random.Random(comm.rank), torch.zeros((), dtype=torch.int64, device=device)
    busy = torch.ones(4096, 4096, device=device)
    torch.manual_seed(comm.rank)
    for _ in range(REPLAYS):
        for x in xs:
            x.normal_()
        others.zero_()
        every = [comm.gather_rows(x.unsqueeze(0)) for x in xs]
        chance = draw.random()
        if chance < 0.1:
            time.sleep(draw.random() * 3e-3)
        elif chance < 0.2:
            busy @ busy  # this device comes late, its host does not
        replay()
        for out, parts in zip(outs, every, strict=True):
            wrong += (out != torch.cat([*parts], 1).float()).sum()
        wrong += (others != comm.size).sum()
    assert not int(wrong), f"{int(wrong)} values in {REPLAYS} replays"


def in_turn(
    platform: Platform, comm: Communicator, device, backend: GraphBackend, gather: Gather
) -> None:
    """Replays with nothing between them: ranks are up to one call ahead of each other."""
    count = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    out = torch.zeros(1, 64 * comm.size, device=device)
    seen = torch.zeros((), dtype=torch.int64, device=device)

    def step() -> None:
        for _ in range(3):
            count.add_(1).remainder_(128)
            gather(count + comm.rank, out)
            want = torch.arange(comm.size, device=device).repeat_interleave(64) + count[0, 0]
            seen.add_((out[0] != want).sum())

    step()
    platform.synchronize()
    replay = backend.capture(step)
    draw = random.Random(comm.rank)
    for _ in range(REPLAYS):
        replay()
        if draw.random() < 0.02:
            time.sleep(draw.random() * 2e-3)
    assert not int(seen)


def rank_of(rank, size, address, results) -> None:
    try:
        platform, _ = select_platform(load_plugins())
        enter(platform, rank, size)
        comm, device = platform.communicator(rank, size, address, 120.0), platform.device(rank)
        backend = platform.graph_backend(rank)
        with torch.inference_mode():
            sums = comm.fast_sums(1 << 20)
            gather = comm.gather_logits(2 * max(ROWS) * EACH)
            assert gather is not None, "this platform's ranks have none; the log says why"
            eager(comm, device, gather)
            captured(platform, comm, device, backend, gather, sums)
            in_turn(platform, comm, device, backend, gather)
        comm.close()
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())


@pytest.mark.parametrize("size", [2, 4])
def test_logits_of_every_size(tmp_path, size):
    check_ranks(tmp_path, size, rank_of)
