"""Sums with the add and the norm behind them in one kernel, on the accelerators that are here: of 2
and of 4 ranks, op by op and captured, with ranks that come late.
"""

from __future__ import annotations

import pytest
import torch
from ranks_on_devices import Rank, SumsBeside, check_ranks
from torch import Tensor

from ds_runtime.ops.reference.matrices.linear import quantize_group
from ds_runtime.parallel.sums.normed import WIDEST
from ds_runtime.platform.contract import Communicator, NormedSum

pytestmark = pytest.mark.gpu
ROWS = (0, 1, 2, 3, 7, 8, 32, 37, 64, 127, 128, 129, 256, 511, 512)
WIDTH, EPS = 7168, 1e-6
WIDTHS = (8, 24, 2048, 5120, 7168, 8192, 8200, WIDEST)
STEP = (1, 37, 512, 8, 1, 128, 300, 2)  # rows of the sums of a captured step


def off(comm: Communicator, found, parts, residual: Tensor, weight: Tensor) -> Tensor:
    """How many values are not as the contract says, on the device. Sums have the bits of parts that
    torch adds one by one in float32. Norms are within one rounding of those of `summed` in float64,
    which is half a unit in the last place, and as much again for float32 before it."""
    normed, summed = found
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    want = total.to(parts.dtype) + residual
    wrong = (summed != want).sum()
    exact = want.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    wrong += ((normed.double() - exact).abs() > 2.0**-8 * exact.abs()).sum()
    for one in found:
        every = comm.gather_rows(one.reshape(1, -1)).view(torch.int16)
        wrong += (every != every[0]).sum()
    return wrong


def quantised(own: Rank, norm: NormedSum, rows: int, width: int) -> None:
    """Codes are those that torch makes on the CPU of what the kernel returns unquantised, which
    `off` judges. The norm is rounded to bfloat16 first. On CUDA torch multiplies by 1 / 448, which
    moves a scale by its last bit."""
    parts = own.parts(rows + width, rows, width)
    residual, weight = own.drawn(90, rows, width), own.drawn(91, 1, width)[0]
    given = parts[own.comm.rank], weight, EPS
    plain = norm(given[0], residual.clone(), *given[1:])
    for powers in (False, True):
        found = norm.quantized(given[0], residual.clone(), *given[1:], powers)
        codes, scale = quantize_group(plain[0].cpu(), 128, powers)
        assert found[0].shape == (rows, width) and found[1].shape == (rows, width // 128)
        wrong = int((found[0].float().cpu() != codes.float()).sum())
        assert torch.equal(found[1].cpu(), scale) and not wrong, f"{rows} × {width}: {wrong} codes"
        assert torch.equal(found[2], plain[1])


def eager(own: Rank, norm: NormedSum) -> None:
    comm = own.comm
    cases = [(rows, WIDTH) for rows in ROWS] + [(3, width) for width in WIDTHS]
    for rows, width in cases:
        seed = 1000 * rows + width
        parts = own.parts(seed, rows, width)
        for dtype in (torch.bfloat16, torch.float32):
            residual = own.drawn(seed + 90, rows, width)
            weight = own.drawn(seed + 91, 1, width, dtype)[0]
            x = parts[comm.rank].clone()
            found = norm(x, residual.clone(), weight, EPS)
            assert torch.equal(x, parts[comm.rank]), "what was given is changed"
            assert found[0].shape == found[1].shape == (rows, width)
            if rows:
                wrong = int(off(comm, found, parts, residual, weight))
                assert not wrong, f"{rows} × {width}, weight of {dtype}: {wrong} values"
        if width % 128 == 0:
            quantised(own, norm, rows, width)
    apart = torch.empty(1 + 2 * WIDTH, dtype=torch.bfloat16, device=own.device)[1:].view(2, WIDTH)
    parts = own.parts(0, 2, WIDTH)
    residual = own.drawn(90, 2, 2 * WIDTH)[:, ::2]  # strided, and a part not aligned
    weight = own.drawn(91, 1, WIDTH)[0]
    found = norm(apart.copy_(parts[comm.rank]), residual, weight, EPS)
    assert not int(off(comm, found, parts, residual, weight))


def captured(own: Rank, norm: NormedSum) -> None:
    """A step of several, between which others sum, too."""
    beside = SumsBeside(own, len(STEP))
    xs = [torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=own.device) for rows in STEP]
    residuals = [own.drawn(rows, rows, WIDTH) for rows in STEP]
    weight = own.drawn(91, 1, WIDTH)[0]
    outs = [(torch.empty_like(x), torch.empty_like(x)) for x in xs]

    def step() -> None:
        for n, (x, residual, out) in enumerate(zip(xs, residuals, outs, strict=True)):
            for to, made in zip(out, norm(x, residual.clone(), weight, EPS), strict=True):
                to.copy_(made)
            beside.sum(n)

    def wrong(every: list[Tensor]) -> Tensor:
        count = beside.wrong()
        for out, parts, residual in zip(outs, every, residuals, strict=True):
            count += off(own.comm, out, parts, residual, weight)
        return count

    own.check_late(step, xs, wrong)


def behind_each_other(own: Rank, norm: NormedSum) -> None:
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=own.device)
    state = own.drawn(90, 4, WIDTH)
    given = own.drawn(own.comm.rank, 4, WIDTH)
    coded = torch.zeros(4, WIDTH, dtype=torch.uint8, device=own.device)

    def step() -> None:
        for rows in (4, 1, 3):
            normed, _ = norm(given[:rows], state[:rows].clone(), weight, EPS)
            state[:rows].copy_(normed)
            codes, *_ = norm.quantized(given[:rows], state[:rows].clone(), weight, EPS, True)
            coded[:rows].copy_(codes.view(torch.uint8))

    for n in own.in_turn(step):
        if n % 100 == 99:
            for one in (state.view(torch.uint8), coded):
                every = own.comm.gather_rows(one.view(1, -1))
                assert torch.equal(every, every[:1].expand_as(every)), f"bits differ by replay {n}"


def check(own: Rank) -> None:
    norm = own.comm.normed_sum(2 * max(ROWS) * WIDTH)
    assert norm is not None, "this platform's ranks have none; the log says why"
    eager(own, norm)
    captured(own, norm)
    behind_each_other(own, norm)


@pytest.mark.parametrize("size", [2, 4])
def test_a_sum_with_its_norm_of_every_size(tmp_path, size):
    check_ranks(tmp_path, size, check)
