"""The CUDA plugin's kernels over bfloat16 weights in 12 bits, on a GPU."""

from __future__ import annotations

import pytest
import torch
from vendor_doubles import packed12 as double

from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.packed12 import format as packed12
from ds_runtime_cuda.packed12 import linear

pytestmark = pytest.mark.gpu
TILES = (*linear._TILES, *linear._UNEVEN.values())


def weight(rows: int, columns: int, others: int = 700) -> torch.Tensor:
    """One in `others` has an exponent that no other has: tiny, zero, large."""
    values = (torch.randn(rows, columns, device="cuda") * 0.02).bfloat16()
    at = torch.randperm(values.numel(), device="cuda")[: values.numel() // others]
    values.view(-1)[at] = (torch.randn(len(at), device="cuda") * 1e-9).bfloat16()
    values.view(-1)[at[::3]] = 0
    values.view(-1)[at[1::9]] = -37.5
    return values


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (1000, 512), (130, 192), (1, 64)])
def test_tiles_are_what_they_are_to_be(rows, columns):
    torch.manual_seed(rows)
    values = weight(rows, columns)
    coded = packed12.encode(values, "nothing")
    assert coded is not None
    got = double.stacked(coded.tiles, coded.power, columns // 64)
    assert torch.equal(got[:rows], values.double().cpu())
    again = packed12.encode(values, "nothing")
    assert again is not None
    assert torch.equal(coded.tiles, again.tiles), "others in one order"


def test_stacks_of_two_matrices():
    torch.manual_seed(1)
    values = weight(3 * 2 * 256, 192).view(3, 512, 192)
    coded = packed12.encode(values, "nothing", halves=2)
    assert coded is not None
    steps, size = 3, coded.tiles.numel() // 3
    for e in range(3):
        own = coded.tiles[e * size : (e + 1) * size]
        got = double.stacked(own, coded.power, steps, 2, 2)
        assert torch.equal(got, values[e].double().cpu())


def replay(call, x: torch.Tensor, out: torch.Tensor, want) -> None:
    """call() writes out; captured, it computes what x holds then."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        expected = want()
        error = ((out.double() - expected).norm() / expected.norm()).item()
        assert error < (3e-6 if out.dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("cores", [None, 3])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (1000, 512), (650, 1984), (40_000, 128)])
def test_linears(monkeypatch, tile, rows, columns, cores):
    if cores is not None:
        monkeypatch.setattr(nvrtc, "cores", lambda device: cores)
    torch.manual_seed(rows + tile.tokens)
    values = weight(rows, columns)
    coded = packed12.encode(values, "nothing")
    assert coded is not None
    for tokens in sorted({1, 3, tile.tokens // 2 + 1, tile.tokens}):
        for dtype in (torch.float32, torch.bfloat16):
            apart = torch.full((tokens, columns + 8), float("nan"), device="cuda").bfloat16()
            x = apart[:, :columns]
            x.copy_(torch.randn(tokens, columns, device="cuda"))
            out = torch.empty(tokens, rows, device="cuda", dtype=dtype)
            replay(
                lambda x=x, out=out: linear.multiply(x, coded, out, tile),
                x,
                out,
                lambda x=x: x.double() @ values.double().T,
            )


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (3648, 2048), (130, 576), (576, 5952)])
def test_few_tokens(rows, columns):
    torch.manual_seed(columns)
    values = weight(rows, columns)
    coded = packed12.encode(values, "nothing")
    assert coded is not None
    for tokens in (1, 2, 5, 8):
        for dtype in (torch.float32, torch.bfloat16):
            apart = torch.full((tokens, columns + 8), float("nan"), device="cuda").bfloat16()
            x = apart[:, :columns]
            x.copy_(torch.randn(tokens, columns, device="cuda"))
            out = torch.empty(tokens, rows, device="cuda", dtype=dtype)
            replay(
                lambda x=x, out=out: linear.multiply_few(x, coded, out),
                x,
                out,
                lambda x=x: x.double() @ values.double().T,
            )


def test_nan_and_infinity_stay_where_they_are():
    torch.manual_seed(5)
    values = weight(256, 128)
    x = torch.randn(8, 128, device="cuda").bfloat16()
    coded = packed12.encode(values, "nothing")
    assert coded is not None

    def both(coded: packed12.CodedDense) -> list[torch.Tensor]:
        made = [torch.empty(8, 256, device="cuda") for _ in range(2)]
        linear.multiply(x, coded, made[0], TILES[0])
        linear.multiply_few(x, coded, made[1])
        return made

    clean = both(coded)
    x[3, 77], x[5] = float("inf"), float("nan")
    others = torch.ones(8, dtype=torch.bool, device="cuda")
    others[[3, 5]] = False
    for was, now in zip(clean, both(coded), strict=True):
        assert torch.equal(was[others], now[others])
        assert now[5].isnan().all() and not now[3].isfinite().any()
    values[100, 5] = float("nan")
    spoiled = packed12.encode(values, "nothing")
    if spoiled is not None:  # else it is held as it is
        rows = torch.ones(256, dtype=torch.bool, device="cuda")
        rows[100] = False
        for was, now in zip(clean, both(spoiled), strict=True):
            assert torch.equal(was[others][:, rows], now[others][:, rows])
            assert now[others][:, 100].isnan().all()
