"""What csrc/experts_streaming.cu does, for a host: over the addresses that its launches are given.

Stands in for ds_runtime_cuda.nvrtc. A map of boxes is the address, rows, columns and bytes of an
element of its matrix, rows of a box, and elements from one row to the next. Each of the three
launches reads what the ones before it have written.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from ds_runtime.ops.reference.activation import silu_mul
from vendor_doubles import require
from vendor_doubles.maths import spread

FP8, BF16, F32, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32


def at(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The memory there."""
    size = math.prod(shape)
    if not size:
        return torch.empty(shape, dtype=dtype)
    held = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=dtype, count=size).view(shape)


def box_map(
    address: int, dtype: torch.dtype, rows: int, columns: int, box_rows: int, pitch: int = 0
):
    require(address % 16 == 0 and columns * dtype.itemsize % 128 == 0, "whole lines of 128 bytes")
    known = (address, rows, columns, dtype.itemsize, box_rows, pitch or columns)
    return (*known, *(0 for _ in range(16 - len(known))))


def cores(device: torch.device) -> int:
    return 132


class Module:
    def __init__(self, name: str, defines: dict[str, int]) -> None:
        self.name, self.defines = name, defines

    def function(self, name: str, shared: int = 0):
        return name, self.defines, shared


def module(source: str, defines: dict[str, int], pin: str) -> Module:
    return Module(source, defines)


def launch(function, grid, threads: int, shared: int, a: ctypes.Structure) -> None:
    name, defines, room = function
    if name not in ("arrange", "experts", "combine"):
        from vendor_doubles import packed12

        packed12.launch(function, grid, threads, shared, a)
        return
    fp8 = defines["FP8"]
    require(room == shared and ctypes.sizeof(a) == defines["ARGS"], "as it was prepared")
    {"arrange": arrange, "experts": experts, "combine": combine}[name](a, defines["BM"], fp8, grid)


def _quantised(x: Tensor, powers: int) -> tuple[Tensor, Tensor]:
    groups = x.float().view(x.shape[0], -1, 128)
    scale = groups.abs().amax(2).clamp(min=1e-4) / 448
    if powers:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (groups / scale[:, :, None]).clamp(-448, 448).view(x.shape).to(FP8), scale


def _given(a, row: Tensor, token: int) -> tuple[Tensor, Tensor]:
    if not a.scales:
        return _quantised(row, a.powers)
    groups = a.hidden // 128
    every = at(a.scales, F32, token * a.scale_row + (groups - 1) * a.scale_group + 1)
    scale = torch.as_strided(every, (1, groups), (1, a.scale_group), token * a.scale_row)
    return row, scale


def _tiles(a, bm: int) -> list[tuple[int, int]]:
    """(expert, pairs) of each tile."""
    table = at(a.begins, torch.int16, 2 * a.experts + 1)
    begins, counts = table[: a.experts + 1].tolist(), table[a.experts + 1 :].tolist()
    found: list[tuple[int, int]] = []
    for e, count in enumerate(counts):
        assert begins[e] == len(found)
        found += [(e, min(bm, count - i)) for i in range(0, count, bm)]
    assert len(found) == begins[-1] <= a.most
    return found


def arrange(a, bm: int, fp8: int, grid) -> None:
    require(grid[0] == a.tokens and grid[1] in (1, -(-a.hidden // 1024)), "a block per token")
    ids = at(a.ids, I32, a.tokens * a.top_k)
    counts = torch.bincount(ids[ids >= 0], minlength=a.experts)
    tiles = (counts + bm - 1) // bm
    table = at(a.begins, torch.int16, 2 * a.experts + 1)
    table[0], table[1 : a.experts + 1] = 0, tiles.cumsum(0)
    table[a.experts + 1 :] = counts
    at(a.state, I32, 1 + a.most).zero_()
    wide = at(a.input, FP8 if a.scales else BF16, (a.tokens - 1) * a.stride + a.hidden)
    x = torch.as_strided(wide, (a.tokens, a.hidden), (a.stride, 1))
    x_rows = at(a.x_rows, FP8 if fp8 else BF16, a.rows, a.hidden)
    taken = [0] * a.experts
    for pair, e in enumerate(ids.tolist()):
        if e < 0:
            continue
        row = int(table[e]) * bm + taken[e]
        taken[e] += 1
        at(a.pair_of, I32, a.rows)[row] = pair
        at(a.weight_of, F32, a.rows)[row] = at(a.weights, F32, a.tokens * a.top_k)[pair]
        token = x[pair // a.top_k][None]
        if fp8:
            codes, scale = _given(a, token, pair // a.top_k)
            x_rows[row] = codes[0]
            at(a.x_scale, F32, a.hidden // 128, a.rows)[:, row] = scale[0]
        else:
            x_rows[row] = token[0]


def _weights(a, fp8: int) -> tuple[Tensor, Tensor]:
    """float32 [experts, 2 · inter, hidden] and [experts, hidden, inter]."""
    if a.gate_up_tiles:
        from vendor_doubles import fp8_compressed, packed12

        return (fp8_compressed if fp8 else packed12).experts_of(a)
    wide = []
    for i, (rows, columns, scales) in enumerate(
        ((2 * a.inter, a.hidden, a.gate_up_scale), (a.hidden, a.inter, a.down_scale))
    ):
        address, count, across, size, box, *_ = a.maps[16 * i : 16 * i + 16]
        require((count, across, box) == (a.experts * rows, columns, 128), "all experts' rows")
        require(size == (1 if fp8 else 2), "elements as compiled")
        values = at(address, FP8 if fp8 else BF16, a.experts, rows, columns)
        if fp8:
            scale = at(scales, F32, a.experts, rows // 128, columns // 128)
            values = spread(values, scale, 128, 128)
        wide.append(values.float())
    return wide[0], wide[1]


def _rows(a, fp8: int, i: int, columns: int, scales: int) -> Tensor:
    address, count, across, _, box, *_ = a.maps[16 * i : 16 * i + 16]
    require((count, across, box) == (a.rows, columns, 8), "rows of pairs, eight at a time")
    values = at(address, FP8 if fp8 else BF16, a.rows, columns)
    if not fp8:
        return values.float()
    scale = at(scales, F32, columns // 128, a.rows).T
    return values.float() * scale.repeat_interleave(128, 1)


def experts(a, bm: int, fp8: int, grid) -> None:
    require(grid[1] == 1, "blocks in one row")
    gate_up, down = _weights(a, fp8)
    y = at(a.y, BF16, a.tokens * a.top_k, a.hidden)
    h_rows = at(a.h_rows, FP8 if fp8 else BF16, a.rows, a.inter)
    for tile, (expert, count) in enumerate(_tiles(a, bm)):
        own = slice(tile * bm, tile * bm + count)
        x = _rows(a, fp8, 2, a.hidden, a.x_scale)[own]
        h = silu_mul(x @ gate_up[expert].T)
        if fp8:
            codes, scale = _quantised(h, a.powers)
            h_rows[own] = codes
            at(a.h_scale, F32, a.inter // 128, a.rows)[:, own] = scale.T
        else:
            h_rows[own] = h.to(BF16)
        made = _rows(a, fp8, 3, a.inter, a.h_scale)[own] @ down[expert].T
        weight = at(a.weight_of, F32, a.rows)[own, None]
        y[at(a.pair_of, I32, a.rows)[own].long()] = (made * weight).to(BF16)


def combine(a, bm: int, fp8: int, grid) -> None:
    require(grid == (a.tokens, -(-a.hidden // 1024)), "a block per token and part of its row")
    y = at(a.y, BF16, a.tokens, a.top_k, a.hidden).float()
    y = y.masked_fill(at(a.ids, I32, a.tokens, a.top_k, 1) < 0, 0)
    at(a.out, BF16, a.tokens, a.hidden).copy_(y.sum(1))
