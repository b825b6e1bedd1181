"""Sums with the add and the norm behind them in one kernel, on the accelerators that are here: of 2
and of 4 ranks, op by op and captured, with ranks that come late.
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
from ds_runtime.ops.reference.matrices.linear import quantize_group
from ds_runtime.parallel.sums.normed import WIDEST
from ds_runtime.platform.contract import Communicator, GraphBackend, NormedSum, Platform
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform

pytestmark = pytest.mark.gpu
ROWS = (0, 1, 2, 3, 7, 8, 32, 37, 64, 127, 128, 129, 256, 511, 512)
WIDTH, REPLAYS, EPS = 7168, 1000, 1e-6
WIDTHS = (8, 24, 2048, 5120, 7168, 8192, 8200, WIDEST)
STEP = (1, 37, 512, 8, 1, 128, 300, 2)  # rows of the sums of a captured step


Sums = Mapping[str, Callable[[Tensor], Tensor]]


def drawn(seed, rows, width, device, dtype=torch.bfloat16) -> Tensor:
    """What any rank knows of another's."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=draw).to(dtype).to(device)


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


def quantised(comm: Communicator, device, norm: NormedSum, rows, width) -> None:
    """Codes are those that torch makes on the CPU of what the kernel returns unquantised, which
    `off` judges. The norm is rounded to bfloat16 first. On CUDA torch multiplies by 1 / 448, which
    moves a scale by its last bit."""
    parts = torch.stack([drawn(rows + width + r, rows, width, device) for r in range(comm.size)])
    residual, weight = drawn(90, rows, width, device), drawn(91, 1, width, device)[0]
    given = parts[comm.rank], weight, EPS
    plain = norm(given[0], residual.clone(), *given[1:])
    for powers in (False, True):
        found = norm.quantized(given[0], residual.clone(), *given[1:], powers)
        codes, scale = quantize_group(plain[0].cpu(), 128, powers)
        assert found[0].shape == (rows, width) and found[1].shape == (rows, width // 128)
        wrong = int((found[0].float().cpu() != codes.float()).sum())
        assert torch.equal(found[1].cpu(), scale) and not wrong, f"{rows} × {width}: {wrong} codes"
        assert torch.equal(found[2], plain[1])


def eager(comm: Communicator, device, norm: NormedSum) -> None:
    cases = [(rows, WIDTH) for rows in ROWS] + [(3, width) for width in WIDTHS]
    for rows, width in cases:
        seed = 1000 * rows + width
        parts = torch.stack([drawn(seed + r, rows, width, device) for r in range(comm.size)])
        for dtype in (torch.bfloat16, torch.float32):
            residual = drawn(seed + 90, rows, width, device)
            weight = drawn(seed + 91, 1, width, device, dtype)[0]
            x = parts[comm.rank].clone()
            found = norm(x, residual.clone(), weight, EPS)
            assert torch.equal(x, parts[comm.rank]), "what was given is changed"
            assert found[0].shape == found[1].shape == (rows, width)
            if rows:
                wrong = int(off(comm, found, parts, residual, weight))
                assert not wrong, f"{rows} × {width}, weight of {dtype}: {wrong} values"
        if width % 128 == 0:
            quantised(comm, device, norm, rows, width)
    apart = torch.empty(1 + 2 * WIDTH, dtype=torch.bfloat16, device=device)[1:].view(2, WIDTH)
    parts = torch.stack([drawn(r, 2, WIDTH, device) for r in range(comm.size)])
    residual = drawn(90, 2, 2 * WIDTH, device)[:, ::2]  # strided, and a part not aligned
    weight = drawn(91, 1, WIDTH, device)[0]
    found = norm(apart.copy_(parts[comm.rank]), residual, weight, EPS)
    assert not int(off(comm, found, parts, residual, weight))


def captured(
    platform: Platform,
    comm: Communicator,
    device,
    backend: GraphBackend,
    norm: NormedSum,
    sums: Sums,
) -> None:
    """A step of several, between which others sum, too, replayed with delays and new values."""
    xs = [torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=device) for rows in STEP]
    residuals = [drawn(rows, rows, WIDTH, device) for rows in STEP]
    weight = drawn(91, 1, WIDTH, device)[0]
    outs = [(torch.empty_like(x), torch.empty_like(x)) for x in xs]
    others = torch.zeros(len(STEP), 64, dtype=torch.bfloat16, device=device)

    def step() -> None:
        for n, (x, residual, out) in enumerate(zip(xs, residuals, outs, strict=True)):
            for to, made in zip(out, norm(x, residual.clone(), weight, EPS), strict=True):
                to.copy_(made)
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
        for out, parts, residual in zip(outs, every, residuals, strict=True):
            wrong += off(comm, out, parts, residual, weight)
        wrong += (others != comm.size).sum()
    assert not int(wrong), f"{int(wrong)} values in {REPLAYS} replays"


def behind_each_other(
    platform: Platform, comm: Communicator, device, backend: GraphBackend, norm: NormedSum
) -> None:
    """Replays with nothing between them: ranks are up to one call ahead of each other."""
    parts = [drawn(r, 4, WIDTH, device) for r in range(comm.size)]
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)
    state = drawn(90, 4, WIDTH, device)
    given = parts[comm.rank].clone()
    coded = torch.zeros(4, WIDTH, dtype=torch.uint8, device=device)

    def step() -> None:
        for rows in (4, 1, 3):
            normed, _ = norm(given[:rows], state[:rows].clone(), weight, EPS)
            state[:rows].copy_(normed)
            codes, *_ = norm.quantized(given[:rows], state[:rows].clone(), weight, EPS, True)
            coded[:rows].copy_(codes.view(torch.uint8))

    step()
    platform.synchronize()
    replay = backend.capture(step)
    draw = random.Random(comm.rank)
    for n in range(REPLAYS):
        replay()
        if draw.random() < 0.02:
            time.sleep(draw.random() * 2e-3)
        if n % 100 == 99:
            for one in (state.view(torch.uint8), coded):
                every = comm.gather_rows(one.view(1, -1))
                assert torch.equal(every, every[:1].expand_as(every)), f"bits differ by replay {n}"


def rank_of(rank, size, address, results) -> None:
    try:
        platform, _ = select_platform(load_plugins())
        enter(platform, rank, size)
        comm, device = platform.communicator(rank, size, address, 120.0), platform.device(rank)
        backend = platform.graph_backend(rank)
        with torch.inference_mode():
            sums = comm.fast_sums(1 << 20)
            norm = comm.normed_sum(2 * max(ROWS) * WIDTH)
            assert norm is not None, "this platform's ranks have none; the log says why"
            eager(comm, device, norm)
            captured(platform, comm, device, backend, norm, sums)
            behind_each_other(platform, comm, device, backend, norm)
        comm.close()
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())


@pytest.mark.parametrize("size", [2, 4])
def test_a_sum_with_its_norm_of_every_size(tmp_path, size):
    check_ranks(tmp_path, size, rank_of)
