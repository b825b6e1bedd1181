"""What csrc/packed12.cu, packed12_linear.cu, packed12_linear_few.cu and packed12_experts.cu do, for
a host: over the addresses that their launches are given. Stands in for ds_runtime_cuda.nvrtc.

The layout of tiles is that of csrc/packed12.cuh, written anew: tests on a device hold what encode
makes against `decoded`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_runtime.ops.reference.activation import silu_mul
from vendor_doubles import require
from vendor_doubles.experts_streaming import BF16, F32, I32, at, box_map, cores, module

__all__ = ["box_map", "cores", "decoded", "launch", "module", "stacked"]
U8 = torch.uint8
TILE, OTHERS, FIRST = 12_416, 32, 112


class Places(NamedTuple):
    """Of the weights of a tile [128 · 64] in the order in which lanes hold them: row, column, where
    the low byte lies, and in which byte and at which bits the rest does."""

    row: Tensor
    column: Tensor
    low: Tensor
    high: Tensor
    shift: Tensor
    sign: Tensor
    sign_shift: Tensor


@cache
def places() -> Places:
    sizes = (8, 32, 4, 8)  # warps, lanes, instructions, weights of each
    warp, lane, step, i = (
        torch.arange(n).view([-1 if k == d else 1 for k in range(4)]).expand(sizes).flatten()
        for d, n in enumerate(sizes)
    )
    first, j = i < 4, i % 4
    row = warp * 16 + lane // 4 + i // 2 % 2 * 8
    column = step * 16 + i // 4 * 8 + lane % 4 * 2 + i % 2
    low = warp * 1536 + step // 2 * 512 + lane * 16 + step % 2 * 8 + i
    word = warp * 1536 + 1024 + lane * 16 + step * 4
    sign = word + torch.where(first, j, (j + 1) % 4)
    shift, sign_shift = torch.where(first, 0, 4), torch.where(first, 7, 3)
    return Places(row, column, low, word + j, shift, sign, sign_shift)


def _encoded(bits: Tensor, lowest: int) -> tuple[Tensor, bool]:
    """bits: int32 [128, 64] of bfloat16 → (a tile, whether it has room for the others)."""
    p, tile = places(), torch.zeros(TILE, dtype=torch.int32)
    own = bits[p.row, p.column]
    distance = (own >> 7 & 255) - lowest
    other = (distance < 0) | (distance > 15)
    code = torch.where(other, 0, (distance & 1) << 7 | own & 127)
    tile[p.low] = code.int()
    tile.index_add_(0, p.high, torch.where(other, 0, (distance >> 1) << p.shift).int())
    tile.index_add_(0, p.sign, torch.where(other, 0, (own >> 15) << p.sign_shift).int())
    at_column, at_row = p.column[other], p.row[other]
    order = (at_column * 128 + at_row).argsort()
    found = (at_row | at_column << 7 | 1 << 13 | own[other].long() << 16)[order][:OTHERS]
    for i in range(4):
        tile[12_288 + i : 12_288 + 4 * len(found) : 4] = (found >> 8 * i & 255).int()
    return tile.to(U8), len(order) <= OTHERS


def decoded(tiles: Tensor, power: int) -> Tensor:
    """float64 [count, 128, 64] of uint8 [count, 12416]."""
    p, tiles = places(), tiles.view(-1, TILE).cpu().long()
    high = tiles[:, p.high] >> p.shift & 7
    sign = tiles[:, p.sign] >> p.sign_shift & 1
    bits = sign << 15 | FIRST >> 4 << 11 | high << 8 | tiles[:, p.low]
    made = torch.empty(len(tiles), 128, 64, dtype=torch.float64)
    values = (bits - (bits >> 15 << 16)).to(torch.int16).view(BF16)
    made[:, p.row, p.column] = values.double() * 2.0**power
    words = tiles[:, 12_288:].view(len(tiles), OTHERS, 4) @ (256 ** torch.arange(4))
    for tile, word in zip(*(words >> 13 & 1).nonzero(as_tuple=True), strict=True):
        w = int(words[tile, word])
        kept = torch.tensor((w >> 16) - (w >> 31 << 16), dtype=torch.int16).view(BF16)
        made[tile, w & 127, w >> 7 & 63] = kept.double()
    return made


def stacked(tiles: Tensor, power: int, steps: int, halves: int = 1, half: int = 1) -> Tensor:
    """float64 rows of tiles that lie [row block][steps][halves]; with two halves of `half` row
    blocks, all of one before those of the other."""
    made = decoded(tiles, power).view(-1, half, steps, halves, 128, 64)
    return made.permute(0, 3, 1, 4, 2, 5).reshape(-1, steps * 64)


def launch(function, grid, threads: int, shared: int, a: ctypes.Structure) -> None:
    name, defines, _ = function
    require(ctypes.sizeof(a) == defines["ARGS"], "as it was prepared")
    done = {"count": _count, "encode": _encode, "linear": _linear, "few": _few}
    done |= {"gate_up": _gate_up, "down": _down}
    done[name](a, defines, grid, threads, shared)


def _bits(a) -> Tensor:
    require(a.columns % 64 == 0 == a.weight % 16, "whole tiles")
    return at(a.weight, torch.int16, a.rows, a.columns).int() & 0xFFFF


def _count(a, defines, grid, threads, shared) -> None:
    found = torch.bincount((_bits(a) >> 7 & 255).flatten(), minlength=256)
    at(a.counts, torch.int64, 256).add_(found)


def _encode(a, defines, grid, threads, shared) -> None:
    bits, steps = _bits(a), a.columns // 64
    blocks = -(-a.rows // 128)
    require(grid == (blocks, steps) and threads == 256, "a block for each tile")
    filled = torch.full((blocks * 128, a.columns), a.lowest << 7, dtype=torch.int32)
    filled[: a.rows] = bits
    tiles = at(a.tiles, U8, blocks * steps, TILE)
    for block in range(blocks):
        for k in range(steps):
            own = filled[block * 128 : block * 128 + 128, k * 64 : k * 64 + 64]
            tile, fits = _encoded(own, a.lowest)
            to = block // (a.halves * a.half) * a.half + block % a.half
            half = block // a.half % a.halves
            tiles[(to * steps + k) * a.halves + half] = tile
            if not fits:
                at(a.crowded, I32, 1).fill_(1)


def _weight(a) -> Tensor:
    steps, blocks = a.columns // 64, -(-a.rows // 128)
    require(a.back * a.lift == 1, "two powers of two")
    power = int(torch.tensor(a.back).log2())
    return stacked(at(a.tiles, U8, blocks * steps * TILE), power, steps)[: a.rows]


def _write(a, made: Tensor) -> None:
    at(a.out, F32 if a.wide else BF16, a.tokens, a.rows).copy_(made)


def _linear(a, defines, grid, threads, shared) -> None:
    address, tokens, columns, size, box, pitch, *_ = a.x[:16]
    most = defines["TOKENS"]
    require((tokens, columns, size, box) == (a.tokens, a.columns, 2, most), "all tokens")
    require(a.tokens <= most and grid == (132 * defines["BLOCKS"], 1), "blocks that stay")
    require(threads == (384 if defines["TILES"] == 2 else 288), "warps")
    wide = at(address, BF16, (tokens - 1) * pitch + columns)
    x = torch.as_strided(wide, (tokens, columns), (pitch, 1))
    _write(a, x.double() @ _weight(a).T)


def _few(a, defines, grid, threads, shared) -> None:
    require(a.tokens <= 8 and grid == (-(-a.rows // 16), 1) and threads == 256, "16 rows a block")
    require(shared == a.tokens * (a.columns + 8) * 2 <= 98_304, "tokens on chip")
    wide = at(a.x, BF16, (a.tokens - 1) * a.stride + a.columns)
    x = torch.as_strided(wide, (a.tokens, a.columns), (a.stride, 1))
    _write(a, x.double() @ _weight(a).T)


def _expert(tiles: int, expert: int, rows: int, columns: int, back: float, halves: int) -> Tensor:
    steps, power = columns // 64, int(torch.tensor(back).log2())
    size = rows // 128 * steps * TILE
    held = at(tiles + expert * size, U8, size)
    return stacked(held, power, steps, halves, rows // 128 // halves)


def experts_of(a) -> tuple[Tensor, Tensor]:
    """float32 [experts, 2 · inter, hidden] and [experts, hidden, inter] of
    csrc/experts_streaming.cu."""
    upper = (a.gate_up_tiles, 2 * a.inter, a.hidden, a.gate_up_back, 2)
    lower = (a.down_tiles, a.hidden, a.inter, a.down_back, 1)
    both = []
    for tiles, rows, columns, back, halves in (upper, lower):
        each = [_expert(tiles, e, rows, columns, back, halves) for e in range(a.experts)]
        both.append(torch.stack(each).float())
    return both[0], both[1]


def _gate_up(a, defines, grid, threads, shared) -> None:
    pairs = a.tokens * a.top_k
    require(grid == (a.inter // 16, pairs) and threads == 128, "16 rows of each pair a block")
    require(shared == a.hidden * 2, "a token on chip")
    wide = at(a.x, BF16, (a.tokens - 1) * a.stride + a.hidden)
    x = torch.as_strided(wide, (a.tokens, a.hidden), (a.stride, 1)).double()
    for pair, e in enumerate(at(a.ids, I32, pairs).tolist()):
        if e < 0:
            continue
        weight = _expert(a.gate_up, e, 2 * a.inter, a.hidden, a.gate_up_back, 2)
        made = silu_mul((x[pair // a.top_k] @ weight.T)[None])[0]
        at(a.h, BF16, pairs, a.inter)[pair] = made.to(BF16)


def _down(a, defines, grid, threads, shared) -> None:
    require(grid == (a.hidden // 16, a.tokens) and threads == 64 * a.top_k <= 512, "16 rows")
    require(shared == a.top_k * a.inter * 2, "all choices on chip")
    h = at(a.h, BF16, a.tokens, a.top_k, a.inter).double()
    weights = at(a.weights, F32, a.tokens, a.top_k)
    out = at(a.out, BF16, a.tokens, a.hidden)
    for token, row in enumerate(at(a.ids, I32, a.tokens, a.top_k).tolist()):
        total = torch.zeros(a.hidden, dtype=torch.float64)
        for k, e in enumerate(row):
            if e < 0:
                continue
            weight = _expert(a.down, e, a.hidden, a.inter, a.down_back, 1)
            total += (h[token, k] @ weight.T) * weights[token, k]
        out[token] = total.to(BF16)
