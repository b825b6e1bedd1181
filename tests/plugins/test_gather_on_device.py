"""The head's gather in one kernel, on the accelerators that are here: of 2 and of 4 ranks, op by op
and captured, with ranks that come late.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks_on_devices import Rank, SumsBeside, check_ranks
from torch import Tensor

pytestmark = pytest.mark.gpu
ROWS = (0, 1, 2, 3, 7, 8, 32, 37, 64, 127, 128, 129, 256, 511, 512)
EACH = 16160  # values of a part: V3's of eight ranks
SHAPES = [(rows, EACH, 0) for rows in ROWS] + [(1, 8, 0), (3, 8, 7), (5, 64640, 0), (9, 4096, 13)]
STEP = ((1, EACH), (37, 4096), (512, 2048), (8, EACH), (1, 8), (128, EACH))  # of a captured step


Gather = Callable[[Tensor, Tensor], None]


def eager(own: Rank, gather: Gather) -> None:
    size, device = own.comm.size, own.device
    for rows, n, spare in SHAPES:
        parts, width = own.parts(rows + n, rows, n), size * n - spare
        around = torch.full((rows + 2, width), -1.0, device=device)
        # An odd width leaves rows without alignment, which `out` may have.
        gather(parts[own.comm.rank].clone(), around[1:-1])
        wanted = torch.cat([*parts], 1).float()[:, :width]
        assert torch.equal(around[1:-1], wanted), (rows, n, spare)
        assert bool((around[[0, -1]] == -1).all()), "what lies around is changed"
    strided = torch.zeros(2, 128, dtype=torch.bfloat16, device=device)[:, ::2].fill_(own.comm.rank)
    out = torch.empty(64 * size, 2, device=device).T
    gather(strided, out)
    want = torch.arange(size, device=device).repeat_interleave(64).float()
    assert torch.equal(out, want.expand(2, -1))


def captured(own: Rank, gather: Gather) -> None:
    """A step of several, between which others sum, too."""
    device, beside = own.device, SumsBeside(own, len(STEP))
    xs = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in STEP]
    outs = [torch.zeros(rows, own.comm.size * n, device=device) for rows, n in STEP]

    def step() -> None:
        for n, (x, out) in enumerate(zip(xs, outs, strict=True)):
            gather(x, out)
            beside.sum(n)

    def wrong(every: list[Tensor]) -> Tensor:
        count = beside.wrong()
        for out, parts in zip(outs, every, strict=True):
            count += (out != torch.cat([*parts], 1).float()).sum()
        return count

    own.check_late(step, xs, wrong)


def in_turn(own: Rank, gather: Gather) -> None:
    size, device = own.comm.size, own.device
    count = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    out = torch.zeros(1, 64 * size, device=device)
    seen = torch.zeros((), dtype=torch.int64, device=device)

    def step() -> None:
        for _ in range(3):
            count.add_(1).remainder_(128)
            gather(count + own.comm.rank, out)
            want = torch.arange(size, device=device).repeat_interleave(64) + count[0, 0]
            seen.add_((out[0] != want).sum())

    for _ in own.in_turn(step):
        pass
    assert not int(seen)


def check(own: Rank) -> None:
    gather = own.comm.gather_logits(2 * max(ROWS) * EACH)
    assert gather is not None, "this platform's ranks have none; the log says why"
    eager(own, gather)
    captured(own, gather)
    in_turn(own, gather)


@pytest.mark.parametrize("size", [2, 4])
def test_logits_of_every_size(tmp_path, size):
    check_ranks(tmp_path, size, check)
