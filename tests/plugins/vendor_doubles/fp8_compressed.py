"""What csrc/fp8_compressed.cu does, for a host: over the addresses that its launches are given.
Stands in for ds_runtime_cuda.nvrtc.

The layout of tiles is that of csrc/fp8_compressed.cuh, written anew: tests on a device hold what
encode makes against `encoded` and `decoded`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from vendor_doubles import require
from vendor_doubles.experts_streaming import F32, FP8, I32, at, cores, module
from vendor_doubles.maths import spread

__all__ = ["cores", "decoded", "encoded", "launch", "module", "others", "stacked"]
U8 = torch.uint8
SIDE, ENDS, LIST = 128, 14_336, 14_352
BITS = (7, 5, 4, 3, 2, 1, 0)  # of a byte of the eighth word, that bit 6 of the seven others has


class Places(NamedTuple):
    """Of the weights of a tile in the order in which lanes hold them, [8 warps, 32 lanes, 16 words,
    4 bytes]: row and column; and where the codes are, [8 warps, 32 lanes, 14 words, 4 bytes]."""

    row: Tensor
    column: Tensor
    code: Tensor


@cache
def places() -> Places:
    def grid(*sizes: int) -> list[Tensor]:
        count = len(sizes)
        return [
            torch.arange(n).view([-1 if k == d else 1 for k in range(count)]).expand(sizes)
            for d, n in enumerate(sizes)
        ]

    warp, lane, word, byte = grid(8, 32, 16, 4)
    row = warp * 16 + word % 2 * 8 + lane // 4
    column = word // 4 * 32 + word // 2 % 2 * 16 + lane % 4 * 4 + byte
    warp, lane, word, byte = grid(8, 32, 14, 4)
    whole = word // 4 * 512 + lane * 16 + word % 4 * 4
    code = warp * 1792 + byte + torch.where(word < 12, whole, 1536 + lane * 8 + (word - 12) * 4)
    return Places(row, column, code)


def others(weights: Tensor, base: int) -> Tensor:
    """Of uint8 [128, 128], in the order of Places: which have no code."""
    p = places()
    distance = (weights.int()[p.row, p.column] >> 3 & 15) - base
    return (distance < 0) | (distance > 7)


def encoded(weights: Tensor, base: int, stride: int) -> Tensor:
    """A tile of uint8 [128, 128]."""
    p, tile = places(), torch.zeros(stride, dtype=torch.int32)
    own, apart = weights.int()[p.row, p.column], others(weights, base)
    field = torch.where(apart, own & 0x87, own - 8 * base)
    for group in (0, 1):
        words = field[:, :, 8 * group : 8 * group + 8]
        for i, bit in enumerate(BITS):
            tile[p.code[:, :, 7 * group + i]] = words[:, :, i] | (words[:, :, 7] >> bit & 1) << 6
    lane, word, byte = (torch.arange(n) for n in (32, 16, 4))
    places_of = lane[:, None, None] * 16 + (word // 4 * 512 + word % 4 * 4)[:, None] + byte
    entries: list[int] = []
    for warp in range(8):
        entries += (places_of | (own[warp] >> 3 & 15) << 11)[apart[warp]].tolist()
        tile[ENDS + 2 * warp], tile[ENDS + 2 * warp + 1] = len(entries) & 255, len(entries) >> 8
    for i, entry in enumerate(entries):
        tile[LIST + 2 * i], tile[LIST + 2 * i + 1] = entry & 255, entry >> 8
    return tile.to(U8)


def decoded(tiles: Tensor, base: int) -> Tensor:
    """uint8 [count, 128, 128] of uint8 [count, stride]."""
    p, tiles = places(), tiles.cpu().int()
    codes = tiles[:, p.code]
    made = torch.empty(len(tiles), 8, 32, 16, 4, dtype=torch.int32)
    for group in (0, 1):
        own = codes[:, :, :, 7 * group : 7 * group + 7]
        made[:, :, :, 8 * group : 8 * group + 7] = (own & 0xBF) + 8 * base
        bits = sum((own[:, :, :, i] >> 6 & 1) << bit for i, bit in enumerate(BITS))
        made[:, :, :, 8 * group + 7] = bits + 8 * base
    halves = tiles[:, ENDS:].view(len(tiles), -1, 2) @ torch.tensor([1, 256], dtype=torch.int32)
    for tile, words in enumerate(halves):
        ends, count = words[:8], int(words[7])
        entries = words[8 : 8 + count]
        warp = torch.searchsorted(ends, torch.arange(count, dtype=ends.dtype), right=True)
        place = entries & 2047
        where = (warp, place // 16 % 32, place // 512 * 4 + place // 4 % 4, place % 4)
        made[tile][where] = made[tile][where] & 0x87 | entries >> 11 << 3
    out = torch.empty(len(tiles), SIDE, SIDE, dtype=U8)
    out[:, p.row, p.column] = made.to(U8)
    return out


def stacked(tiles: Tensor, stride: int, base: int, steps: int, halves: int = 1, half: int = 1):
    """uint8 rows of tiles that lie [row block][steps][halves]; with two halves of `half` row
    blocks, all of one before those of the other."""
    made = decoded(tiles.view(-1, stride), base).view(-1, half, steps, halves, SIDE, SIDE)
    return made.permute(0, 3, 1, 4, 2, 5).reshape(-1, steps * SIDE)


def launch(function, grid, threads: int, shared: int, a: ctypes.Structure) -> None:
    name, defines, _ = function
    require(ctypes.sizeof(a) == defines["ARGS"], "as it was prepared")
    require(a.columns % SIDE == 0 == a.weight % 16 and threads == 256, "whole tiles")
    require(grid[1] == a.columns // SIDE, "a block for each tile")
    weight = at(a.weight, U8, grid[0] * SIDE, a.columns)
    {"measure": _measure, "encode": _encode}[name](a, weight, grid)


def _blocks(weight: Tensor, grid):
    for block in range(grid[0]):
        for k in range(grid[1]):
            rows, columns = (slice(i * SIDE, i * SIDE + SIDE) for i in (block, k))
            yield block, k, weight[rows, columns]


def _measure(a, weight: Tensor, grid) -> None:
    most = at(a.most, I32, 9)
    for _, _, own in _blocks(weight, grid):
        counts = torch.bincount((own.int() >> 3 & 15).flatten(), minlength=16)
        for base in range(9):
            most[base] = max(int(most[base]), SIDE * SIDE - int(counts[base : base + 8].sum()))


def _encode(a, weight: Tensor, grid) -> None:
    tiles = at(a.tiles, U8, grid[0] * grid[1], a.stride)
    for block, k, own in _blocks(weight, grid):
        to = block // (a.halves * a.half) * a.half + block % a.half
        half = block // a.half % a.halves
        tiles[(to * grid[1] + k) * a.halves + half] = encoded(own, a.lowest, a.stride)


def experts_of(a) -> tuple[Tensor, Tensor]:
    """float32 [experts, 2 · inter, hidden] and [experts, hidden, inter] of
    csrc/experts_streaming.cu."""
    both = []
    upper = (a.gate_up_tiles, 2 * a.inter, a.hidden, a.gate_up_scale, 2)
    lower = (a.down_tiles, a.hidden, a.inter, a.down_scale, 1)
    codes_of = (a.gate_up_stride, a.gate_up_base), (a.down_stride, a.down_base)
    for (tiles, rows, columns, scales, halves), (stride, base) in zip(
        (upper, lower), codes_of, strict=True
    ):
        steps, count = columns // SIDE, a.experts * rows // SIDE
        held = at(tiles, U8, count * steps * stride)
        codes = stacked(held, stride, base, steps, halves, rows // SIDE // halves)
        scale = at(scales, F32, a.experts, rows // SIDE, steps)
        wide = codes.view(FP8).view(a.experts, rows, columns)
        both.append(spread(wide, scale, SIDE, SIDE).float())
    return both[0], both[1]
