"""Which of a device's parts computes which keys: FlashMLA's plan, made to cost least.

A part is as many multiprocessors as hold all heads. It takes pieces of sequences one after the
other, each some blocks of 64 keys; a sequence in several pieces is summed afterwards. The library
makes parts equal in blocks. But a piece costs besides its blocks, and a sum costs by pieces, so
that 64 sequences of 600 tokens are faster whole. Here some sizes of parts are tried against these
costs.

At least one sequence is in pieces, if need be in one that is all of it and one of nothing. The
kernel that sums is launched while the other one still writes, and programs of it that have nothing
to sum end at once. Were these all, what follows could begin before the results are there. (One part
alone has nothing to cut with; no device is so small.)

The format (`DecodingSchedMeta` of FlashMLA's csrc/params.h, commit 9241ae3): tiles [parts, 8]. They
are the first and the last sequence of a part, the first block of the one and the end of the other.
Then come which piece of the first sequence it is, whether the first and the last are in several
pieces, and nothing. A part without work begins after the last sequence. splits [rows + 1]: pieces
of those before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_runtime_cuda.flash_mla_costs import (
    BLOCK,
    BLOCK_NS,
    HEADS,
    PAIR,
    PIECE,
    PIECE_OF_ALL_NS,
    PIECE_OF_ONE_NS,
    TRIED,
)


def plan(lens: Tensor, parts: int, heads: int) -> tuple[Tensor, Tensor]:
    """lens [rows] int32, rows > 0 → (tiles [parts, 8], splits [rows + 1]) int32 on its device."""
    tiles = torch.empty(parts, 8, dtype=torch.int32, device=lens.device)
    splits = torch.empty(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    if lens.is_cuda:
        from ds_runtime_cuda.flash_mla_plan_device import write_plan

        write_plan(lens, heads, tiles, splits)
    else:
        rows, ends = _planned(lens.tolist(), parts, heads)
        tiles.copy_(torch.tensor(rows, dtype=torch.int32))
        splits.copy_(torch.tensor(ends, dtype=torch.int32))
    return tiles, splits


def _cut(left: int, room: int, size: int) -> tuple[int, int, int]:
    """A sequence of `left` blocks where a part has `room`: (blocks that it takes, parts of `size`
    blocks that follow, room in the last one)."""
    if room >= left + PIECE:
        return left, 0, room - left - PIECE
    first = max(room - PIECE, 0) // PAIR * PAIR
    more = -(-(left - first) // size)
    return first, more, size - (left - first - (more - 1) * size)


def _cost(blocks: Sequence[int], parts: int, heads: int, size: int) -> int | None:
    """Nanoseconds with parts of one piece of `size` blocks, or None where these are too few. Of
    several parts one stays free for a piece of nothing where no sequence is cut."""
    used, room, most, extra = 1, size + PIECE, 1, 0
    for left in blocks:
        first, more, room = _cut(left, room, size)
        used += more
        pieces = more + (first > 0)
        if pieces > 1:
            most, extra = max(most, pieces), extra + pieces
    if used + (not extra and parts > 1) > parts:
        return None
    return BLOCK_NS * size + PIECE_OF_ONE_NS * most + PIECE_OF_ALL_NS * extra * heads // HEADS


def _sizes(total: int, rows: int, parts: int) -> list[int]:
    """Blocks of a part that are tried. The last one is always enough: what a part leaves is less
    than a piece's cost and a block."""
    least = -(-(total + PIECE * max(rows - parts, 0)) // parts)
    first = max(-(-least // PAIR), 1)
    step = 1 + first // TRIED
    safe = -(-(total + PIECE * rows) // max(parts - 1, 1)) + PIECE + 1
    sizes = [PAIR * (first + i * step) for i in range(TRIED)]
    return [*sizes[:-1], max(sizes[-1], -(-safe // PAIR) * PAIR)]


def _planned(lens: Sequence[int], parts: int, heads: int) -> tuple[list[list[int]], list[int]]:
    blocks = [max(-(-n // BLOCK), 1) for n in lens]
    costs = [(_cost(blocks, parts, heads, s), s) for s in _sizes(sum(blocks), len(lens), parts)]
    _, size = min((cost, s) for cost, s in costs if cost is not None)
    tiles = [[len(lens), len(lens) - 1, 0, 0, 0, 0, 0, 0] for _ in range(parts)]
    splits, part, room = [0], 0, size + PIECE
    for row, left in enumerate(blocks):
        fresh = room == size + PIECE
        first, more, room = _cut(left, room, size)
        pieces = more + (first > 0)
        for piece in range(pieces):
            at = part + piece + (first == 0)
            begin = 0 if at == part else first + (at - part - 1) * size
            end = min(left, first if at == part else begin + size)
            tile, cut = tiles[at], int(pieces > 1)
            if at > part or fresh:
                tile[0], tile[2], tile[4], tile[5] = row, begin, piece, cut
            tile[1], tile[3], tile[6] = row, end if lens[row] else 0, cut
        part += more
        splits.append(splits[-1] + pieces)
    if splits[-1] == len(lens) and part + 1 < parts:
        row, last = len(lens) - 1, tiles[part]
        last[5], last[6] = int(last[5] or last[0] == row), 1
        tiles[part + 1] = [row, row, 0, 0, 1, 1, 1, 0]
        splits[-1] += 1
    return tiles, splits
