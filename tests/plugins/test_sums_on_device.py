"""All-reduces in memory that ranks share, on the accelerators that are here: of 2 and of 4 ranks,
op by op and captured, with ranks that come late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from ranks_on_devices import Rank, check_ranks
from torch import Tensor

from ds_runtime.parallel.sums.by_size import BySize
from ds_runtime.parallel.sums.kinds import FAST, LIBRARY, SumSizes
from ds_runtime.platform.contract import Communicator

pytestmark = pytest.mark.gpu
ROWS, WIDTH = (1, 2, 3, 7, 8, 32, 37, 64, 100, 128, 256, 511, 512), 7168
STEP = (1, 37, 512, 8, 300)  # rows of the sums of a captured step
LIMITS = SumSizes((("one_shot", 8 * WIDTH * 2), ("two_shot", 300 * WIDTH * 2)))


Sums = Mapping[str, Callable[[Tensor], Tensor]]


def off(comm: Communicator, found: Tensor, parts: Tensor) -> Tensor:
    """How many values are further from the sum than rounding allows, and how many differ from rank
    0's bits; on the device."""
    size = found.element_size()
    error = (found.double() - parts.double().sum(0)).abs()
    bound = parts.double().abs().sum(0) * comm.size * torch.finfo(found.dtype).eps
    every = comm.gather_rows(found.reshape(1, -1)).view(torch.int32 if size == 4 else torch.int16)
    return (error > bound).sum() + (every != every[0]).sum()


def eager(own: Rank, sums: Sums) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for rows in ROWS:
            parts = own.parts(10 * rows, rows, WIDTH, dtype)
            for kind, sum_up in sums.items():
                x = parts[own.comm.rank].clone()
                found = sum_up(x)
                assert torch.equal(x, parts[own.comm.rank]), f"{kind}: what was given is changed"
                wrong = int(off(own.comm, found, parts))
                assert not wrong, f"{kind} of {rows} rows of {dtype}: {wrong} values"


def captured(own: Rank) -> None:
    """A step of sums of all kinds."""
    group = BySize(own.comm, LIMITS)
    kinds = {LIMITS.kind(rows * WIDTH * 2) for rows in STEP}
    assert kinds == {*FAST, LIBRARY}
    xs = [torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=own.device) for rows in STEP]
    outs = [torch.empty_like(x) for x in xs]

    def step() -> None:
        for x, out in zip(xs, outs, strict=True):
            out.copy_(group.all_reduce(x.clone()))

    def wrong(every: list[Tensor]) -> Tensor:
        pairs = zip(outs, every, strict=True)
        return torch.stack([off(own.comm, out, parts) for out, parts in pairs]).sum()

    own.check_late(step, xs, wrong)


def check(own: Rank) -> None:
    sums = own.comm.fast_sums(max(ROWS) * WIDTH * 4)
    assert [*sums] == [*FAST], f"this platform's ranks have {[*sums]}; the log says why"
    eager(own, sums)
    captured(own)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_every_kind_and_size(tmp_path, size):
    check_ranks(tmp_path, size, check)
