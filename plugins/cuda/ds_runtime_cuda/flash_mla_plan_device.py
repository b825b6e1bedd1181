"""flash_mla_plan.py as one Triton program, where a lane tries a size. Imported on a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ds_runtime_cuda import flash_mla_costs as costs

_BLOCK, _PAIR, _PIECE = (tl.constexpr(n) for n in (costs.BLOCK, costs.PAIR, costs.PIECE))
_TRIED, _HEADS = tl.constexpr(costs.TRIED), tl.constexpr(costs.HEADS)
_BLOCK_NS = tl.constexpr(costs.BLOCK_NS)
_ONE_NS, _ALL_NS = tl.constexpr(costs.PIECE_OF_ONE_NS), tl.constexpr(costs.PIECE_OF_ALL_NS)


@triton.jit
def _cut(left, room, size):
    """See flash_mla_plan._cut."""
    whole = room >= left + _PIECE
    first = tl.where(whole, left, tl.maximum(room - _PIECE, 0) // _PAIR * _PAIR)
    more = tl.where(whole, 0, (left - first + size - 1) // size)
    last = size - (left - first - (more - 1) * size)
    return first, more, tl.where(whole, room - left - _PIECE, last)


@triton.jit(do_not_specialize=["rows", "parts"])
def _plan(lens, tiles, splits, rows, parts, heads, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    total = 0
    for start in range(0, rows, CHUNK):
        at = start + tl.arange(0, CHUNK)
        some = tl.load(lens + at, mask=at < rows, other=0)
        blocks = tl.where(at < rows, tl.maximum((some + _BLOCK - 1) // _BLOCK, 1), 0)
        total += tl.sum(blocks, 0)
    least = tl.cdiv(total + tl.maximum(rows - parts, 0) * _PIECE, parts)
    least = tl.maximum(tl.cdiv(least, _PAIR), 1)
    lane = tl.arange(0, _TRIED)
    safe = tl.cdiv(total + rows * _PIECE, tl.maximum(parts - 1, 1)) + _PIECE + 1
    size = (least + lane * (1 + least // _TRIED)) * _PAIR
    size = tl.where(lane == _TRIED - 1, tl.maximum(size, tl.cdiv(safe, _PAIR) * _PAIR), size)

    room = size + _PIECE
    used, most, extra = lane * 0 + 1, lane * 0 + 1, lane * 0
    length = tl.load(lens)
    for row in range(0, rows):
        after = tl.load(lens + tl.minimum(row + 1, rows - 1))  # on its way while this is cut
        left = tl.maximum((length + _BLOCK - 1) // _BLOCK, 1)
        first, more, room = _cut(left, room, size)
        used += more
        pieces = more + (first > 0).to(tl.int32)
        most = tl.maximum(most, pieces)
        extra += tl.where(pieces > 1, pieces, 0)
        length = after
    used += ((extra == 0) & (parts > 1)).to(tl.int32)
    cost = (size * _BLOCK_NS + most * _ONE_NS + extra * heads * _ALL_NS // _HEADS).to(tl.int64)
    # Equal costs: the smaller size, as the key's lower half. Too few parts: never.
    key = tl.where(used <= parts, cost * (1 << 24) + size, (1 << 62))
    best = (tl.min(key, 0) & ((1 << 24) - 1)).to(tl.int32)

    part = tl.arange(0, PARTS)
    begin_row, begin_block, begin_piece = part * 0 + rows, part * 0, part * 0
    end_row, end_block = part * 0 + rows - 1, part * 0
    begin_cut, end_cut = part * 0, part * 0
    now, free, before = 0, best + _PIECE, 0
    tl.store(splits, 0)
    length = tl.load(lens)
    for row in range(0, rows):
        after = tl.load(lens + tl.minimum(row + 1, rows - 1))
        left = tl.maximum((length + _BLOCK - 1) // _BLOCK, 1)
        fresh = free == best + _PIECE
        first, more, free = _cut(left, free, best)
        here = (first > 0).to(tl.int32)
        pieces = more + here
        cut = (pieces > 1).to(tl.int32)
        piece = part - now - (1 - here)
        taken = (piece >= 0) & (piece < pieces)
        begin = tl.where(part == now, 0, first + (part - now - 1) * best)
        end = tl.minimum(left, tl.where(part == now, first, begin + best))
        opens = taken & ((part > now) | fresh)
        begin_row = tl.where(opens, row, begin_row)
        begin_block = tl.where(opens, begin, begin_block)
        begin_piece = tl.where(opens, piece, begin_piece)
        begin_cut = tl.where(opens, cut, begin_cut)
        end_row = tl.where(taken, row, end_row)
        end_block = tl.where(taken, tl.where(length > 0, end, 0), end_block)
        end_cut = tl.where(taken, cut, end_cut)
        now += more
        before += pieces
        tl.store(splits + row + 1, before)
        length = after
    if (before == rows) & (now + 1 < parts):  # none is cut: a piece of nothing
        tl.store(splits + rows, rows + 1)
        last, nothing = part == now, part == now + 1
        end_cut = tl.where(last | nothing, 1, end_cut)
        begin_cut = tl.where((last & (begin_row == rows - 1)) | nothing, 1, begin_cut)
        begin_row = tl.where(nothing, rows - 1, begin_row)
        begin_piece = tl.where(nothing, 1, begin_piece)
    inside = part < parts
    at = tiles + part * 8
    tl.store(at, begin_row, mask=inside)
    tl.store(at + 1, end_row, mask=inside)
    tl.store(at + 2, begin_block, mask=inside)
    tl.store(at + 3, end_block, mask=inside)
    tl.store(at + 4, begin_piece, mask=inside)
    tl.store(at + 5, begin_cut, mask=inside)
    tl.store(at + 6, end_cut, mask=inside)
    tl.store(at + 7, part * 0, mask=inside)


def write_plan(lens: Tensor, heads: int, tiles: Tensor, splits: Tensor) -> None:
    """See flash_mla_plan.plan; the outputs are filled. lens: contiguous."""
    parts = tiles.shape[0]
    _plan[(1,)](
        lens, tiles, splits, lens.shape[0], parts, heads,
        PARTS=triton.next_power_of_2(parts), CHUNK=128, num_warps=1,
    )  # fmt: skip
