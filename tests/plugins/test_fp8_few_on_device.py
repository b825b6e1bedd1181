"""The CUDA plugin's kernel of FP8 weights for few tokens, on a GPU."""

from __future__ import annotations

import pytest
import torch

from ds_runtime_cuda import fp8_few, nvrtc

pytestmark = pytest.mark.gpu
# Of V3: all, and what a rank of two, four and eight has
WIDTHS = sorted({
    (2112, 7168), (576, 7168), (1536, 7168),
    *((24576 // n, 1536) for n in (1, 2, 4, 8)),
    *((7168, 16384 // n) for n in (1, 2, 4, 8)),
    *((36864 // n, 7168) for n in (1, 2, 4, 8)),
    *((7168, 18432 // n) for n in (1, 2, 4)),
    *((4096 // n, 7168) for n in (1, 2, 4, 8)),
    *((7168, 2048 // n) for n in (1, 2, 4)),
})  # fmt: skip
ODD = [(1, 256), (17, 384), (1000, 512), (130, 24_576), (5003, 2304)]


def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 of all magnitudes, a hundredth of them subnormal, and scales of each block."""
    values = torch.randn(rows, columns, device="cuda") * 60
    few = torch.rand_like(values) < 0.01
    values = torch.where(few, values * 1e-4, values).clamp(-448, 448)
    blocks = -(-rows // 128), columns // 128
    scale = torch.rand(blocks, device="cuda") * 1e-3 + 1e-4
    return values.to(torch.float8_e4m3fn), scale


def right(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64, a part of the rows at a time."""
    parts = []
    for at in range(0, len(values), 1280):
        some = values[at : at + 1280]
        wide = scale[at // 128 : at // 128 + 10].repeat_interleave(128, 0)[: len(some)]
        parts.append(x.double() @ (some.double() * wide.repeat_interleave(128, 1).double()).T)
    return torch.cat(parts, 1)


def strided(tokens: int, columns: int) -> torch.Tensor:
    apart = torch.full((tokens, columns + 8), float("nan"), device="cuda").bfloat16()
    x = apart[:, :columns]
    x.copy_(torch.randn(tokens, columns, device="cuda"))
    return x


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float(((out.double() - want).norm(dim=1) / want.norm(dim=1)).max())


@pytest.mark.parametrize(("rows", "columns"), [*WIDTHS, *ODD])
def test_all_widths(rows, columns):
    torch.manual_seed(rows + columns)
    values, scale = weight(rows, columns)
    for tokens in range(1, 9):
        x = strided(tokens, columns)
        out = torch.full((tokens, rows), float("nan"), device="cuda").bfloat16()
        fp8_few.multiply(x, values, scale, out)
        assert error(out, right(x, values, scale)) < (4e-3 if rows > 16 else 1e-2)


@pytest.mark.parametrize("cores", [None, 2, 6])
@pytest.mark.parametrize("group", fp8_few.GROUPS)
@pytest.mark.parametrize("ahead", [2, 3, 4])
def test_every_group_of_tiles_gives_the_same_row_alone(monkeypatch, cores, group, ahead):
    if cores is not None:
        monkeypatch.setattr(nvrtc, "cores", lambda device: cores)
    torch.manual_seed(group)
    values, scale = weight(5003, 4224)  # 33 blocks of columns: halves are unequal
    x = strided(8, 4224)
    out = torch.empty(8, 5003, device="cuda").bfloat16()
    fp8_few.multiply(x, values, scale, out, group, ahead)
    assert error(out, right(x, values, scale)) < 4e-3
    for tokens in (1, 3, 5):
        less = torch.empty(tokens, 5003, device="cuda").bfloat16()
        fp8_few.multiply(x[:tokens], values, scale, less, group, ahead)
        assert torch.equal(less, out[:tokens])


@pytest.mark.parametrize(("rows", "columns"), [(2112, 7168), (7168, 1024), (5003, 2304)])
def test_replays_give_the_same_bits(rows, columns):
    """Of two launches, the second of which may begin while the first ends."""
    torch.manual_seed(1)
    values, scale = weight(rows, columns)
    back, back_scale = weight(columns, -(-rows // 128) * 128)
    x = strided(8, columns)
    between = torch.zeros(8, back.shape[1], device="cuda").bfloat16()
    made = torch.empty(8, rows, device="cuda").bfloat16()
    out = torch.empty(8, columns, device="cuda").bfloat16()

    def call() -> None:
        fp8_few.multiply(x, values, scale, made)
        between[:, :rows].copy_(made)
        fp8_few.multiply(between, back, back_scale, out)
        fp8_few.multiply(out, values, scale, made)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        want = right(out, values, scale)
        assert error(made, want) < 4e-3
        kept = made.clone()
        for _ in range(200):
            made.fill_(float("nan"))
            graph.replay()
            assert torch.equal(made, kept)


def test_nan_and_infinity_stay_where_they_are():
    torch.manual_seed(5)
    values, scale = weight(300, 512)
    x = torch.randn(8, 512, device="cuda").bfloat16()

    def made() -> torch.Tensor:
        out = torch.empty(8, 300, device="cuda").bfloat16()
        fp8_few.multiply(x, values, scale, out)
        return out

    clean = made()
    x[3, 77], x[7] = float("inf"), float("nan")
    spoiled = made()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(spoiled[others], clean[others])
    assert spoiled[7].isnan().all() and not spoiled[3].isfinite().any()
