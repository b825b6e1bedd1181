"""Triton kernels of quant.py and grouped.py. Imported on a GPU only.

Integers that follow the tokens of a call are not specialised: one compilation serves all counts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # channels that one program holds: 8 groups
_WARPS = 2  # of it: fewer values for each thread keep less memory on its way


@triton.jit
def _scaled(values, POWERS: tl.constexpr):
    """(e4m3 [groups, 128], scales [groups]) of [groups, 128] values."""
    largest = tl.max(tl.abs(values), axis=1)
    scale = tl.div_rn(tl.maximum(largest, 1e-4), tl.full(largest.shape, 448.0, tl.float32))
    if POWERS:  # as quant.power_above
        bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF
        scale = (bits & -0x800000).to(tl.float32, bitcast=True)
    # Quotients that are rounded another way would fall to another neighbour at every tie: by a
    # reciprocal that is rounded right and one correction they are those of a division (Markstein,
    # IBM J. Res. Dev. 34, 1990), but for the sign of a zero and groups that are not finite.
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    inverse = tl.broadcast_to(inverse[:, None], values.shape)
    near = values * inverse
    rest = tl.fma(-near, tl.broadcast_to(scale[:, None], values.shape), values)
    quotient = tl.fma(rest, inverse, near)
    q = tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return q.to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["scale_column"])
def _quantise(x, q, scale, n, x_row, scale_column, POWERS: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = CHUNK // 128
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = at < n
    values = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    coded, sizes = _scaled(values, POWERS)
    tl.store(q + row * n + at, coded, mask=inside)
    tl.store(scale + group * scale_column + row, sizes, mask=group * 128 < n)


def quantise_rows(x: Tensor, q: Tensor, scale: Tensor, powers: bool = False) -> None:
    """See quant.quantise; the outputs are filled."""
    tokens, n = x.shape
    if tokens:
        _quantise[(tokens, triton.cdiv(n, _CHUNK))](
            x,
            q,
            scale,
            n,
            x.stride(0),
            scale.stride(1),
            POWERS=powers,
            CHUNK=_CHUNK,
            num_warps=_WARPS,
        )


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """counts [blocks, EXPERTS]: pairs of each expert in every block."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + at, mask=at < pairs, other=-1)
    found = tl.histogram(id, EXPERTS, mask=id >= 0)
    tl.store(counts + block * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["blocks"])
def _bounds(
    counts, ends, blocks, experts, align, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One program: ends [experts], and instead of counts the row of each block's first pair."""
    expert, block = tl.arange(0, EXPERTS), tl.arange(0, BLOCKS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, blocks, BLOCKS):
        at = counts + (start + block)[:, None] * EXPERTS + expert[None, :]
        total += tl.sum(tl.load(at, mask=(start + block < blocks)[:, None], other=0), 0)
    size = tl.cdiv(total, align) * align
    end = tl.cumsum(size, 0)
    tl.store(ends + expert, end, mask=expert < experts)
    before = end - size
    for start in range(0, blocks, BLOCKS):
        at = counts + (start + block)[:, None] * EXPERTS + expert[None, :]
        inside = (start + block < blocks)[:, None]
        found = tl.load(at, mask=inside, other=0)
        tl.store(at, before[None, :] + tl.cumsum(found, 0) - found, mask=inside)
        before += tl.sum(found, 0)


@triton.jit(do_not_specialize=["pairs", "most"])
def _place(
    ids, first, ends, rows, owner, pairs, most, experts,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The first programs: rows of PAIRS pairs, behind those of one expert in the same block; −1 of
    those that have none here. The others: owners of ROWS rows."""
    pid = tl.program_id(0)
    programs = tl.cdiv(pairs, PAIRS)
    if pid < programs:
        at = pid * PAIRS + tl.arange(0, PAIRS)
        id = tl.load(ids + at, mask=at < pairs, other=-1)
        block = pid * PAIRS // BLOCK
        other = block * BLOCK + tl.arange(0, BLOCK)
        theirs = tl.load(ids + other, mask=other < pairs, other=-1)
        ahead = (theirs[None, :] == id[:, None]) & (other[None, :] < at[:, None])
        rank = tl.sum(ahead.to(tl.int32), 1)
        place = tl.load(first + block * EXPERTS + id, mask=id >= 0, other=0) + rank
        tl.store(rows + at, tl.where(id >= 0, place, -1).to(tl.int64), mask=at < pairs)
    else:
        row = (pid - programs) * ROWS + tl.arange(0, ROWS)
        expert = tl.arange(0, EXPERTS)
        end = tl.load(ends + expert, mask=expert < experts, other=0x7FFFFFFF)
        found = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
        tl.store(owner + row, tl.where(found < experts, found, -1), mask=row < most)


def place_pairs(ids: Tensor, align: int, rows: Tensor, owner: Tensor, ends: Tensor) -> None:
    """See grouped.sort_rows; the outputs are filled. ids: contiguous."""
    pairs, most, experts = ids.numel(), owner.shape[0], ends.shape[0]
    width, block = triton.next_power_of_2(max(experts, 2)), 1024
    blocks = triton.cdiv(pairs, block)
    counts = ends.new_empty(blocks, width)
    _count[(blocks,)](ids, counts, pairs, EXPERTS=width, BLOCK=block)
    _bounds[(1,)](
        counts, ends, blocks, experts, align, EXPERTS=width, BLOCKS=max(1, 8192 // width),
        num_warps=8,
    )  # fmt: skip
    few, part = 16, max(1, 8192 // width)
    _place[(triton.cdiv(pairs, few) + triton.cdiv(most, part),)](
        ids, counts, ends, rows, owner, pairs, most, experts, EXPERTS=width, BLOCK=block,
        PAIRS=few, ROWS=part,
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale_column"])
def _scatter(
    x, rows, q, scale, n, x_row, scale_column,
    TOP_K: tl.constexpr, POWERS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = CHUNK // 128
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = at < n
    values = tl.load(x + token * x_row + at, mask=inside, other=0.0).to(tl.float32)
    coded, sizes = _scaled(values, POWERS)
    for i in range(TOP_K):
        row = tl.load(rows + token * TOP_K + i).to(tl.int64)
        end = tl.where(row >= 0, n, 0)
        tl.store(q + row * n + at, coded, mask=at < end)
        tl.store(scale + group * scale_column + row, sizes, mask=group * 128 < end)


@triton.jit(do_not_specialize=["from_row", "from_group", "scale_column"])
def _scatter_codes(
    given, given_scale, rows, q, scale, n, given_row, from_row, from_group, scale_column,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = CHUNK // 128
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    coded = tl.load(given + token * given_row + at, mask=at < n, other=0)
    sizes = given_scale + token * from_row + group * from_group
    sizes = tl.load(sizes, mask=group * 128 < n, other=0.0)
    for i in range(TOP_K):
        row = tl.load(rows + token * TOP_K + i).to(tl.int64)
        end = tl.where(row >= 0, n, 0)
        tl.store(q + row * n + at, coded, mask=at < end)
        tl.store(scale + group * scale_column + row, sizes, mask=group * 128 < end)


def codes_to(given: Tensor, given_scale: Tensor, rows: Tensor, q: Tensor, scale: Tensor) -> None:
    """See grouped.scatter_codes; codes are bytes."""
    tokens, n = given.shape
    _scatter_codes[(tokens, triton.cdiv(n, _CHUNK))](
        given, given_scale, rows, q, scale, n, given.stride(0), *given_scale.stride(),
        scale.stride(1), TOP_K=rows.shape[1], CHUNK=_CHUNK, num_warps=_WARPS,
    )  # fmt: skip


def quantise_to(x: Tensor, rows: Tensor, q: Tensor, scale: Tensor, powers: bool = False) -> None:
    """See grouped.scatter."""
    tokens, n = x.shape
    _scatter[(tokens, triton.cdiv(n, _CHUNK))](
        x, rows, q, scale, n, x.stride(0), scale.stride(1), TOP_K=rows.shape[1], POWERS=powers,
        CHUNK=_CHUNK, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale_column"])
def _silu(gate_up, owner, q, scale, n, scale_column, POWERS: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(owner + row) >= 0:
        GROUPS: tl.constexpr = CHUNK // 128
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = at < n
        gate = tl.load(gate_up + row * 2 * n + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * n + n + at, mask=inside, other=0.0).to(tl.float32)
        # As silu_mul rounds its result, so that a fused and a composed step agree.
        values = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty).to(tl.float32)
        coded, sizes = _scaled(values, POWERS)
        tl.store(q + row * n + at, coded, mask=inside)
        tl.store(scale + group * scale_column + row, sizes, mask=group * 128 < n)


def silu_quantise(
    gate_up: Tensor, owner: Tensor, q: Tensor, scale: Tensor, powers: bool = False
) -> None:
    """See grouped.silu."""
    rows, n = q.shape
    _silu[(rows, triton.cdiv(n, _CHUNK))](
        gate_up,
        owner,
        q,
        scale,
        n,
        scale.stride(1),
        POWERS=powers,
        CHUNK=_CHUNK,
        num_warps=_WARPS,
    )


@triton.jit
def _combine(y, weights, rows, out, n, TOP_K: tl.constexpr, CHUNK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < n
    total = tl.zeros((CHUNK,), tl.float32)
    for i in range(TOP_K):
        row = tl.load(rows + token * TOP_K + i).to(tl.int64)
        end = tl.where(row >= 0, n, 0)
        weight = tl.where(row >= 0, tl.load(weights + token * TOP_K + i), 0.0)
        total += weight * tl.load(y + row * n + at, mask=at < end, other=0.0).to(tl.float32)
    tl.store(out + token * n + at, total.to(out.dtype.element_ty), mask=inside)


def combine_rows(y: Tensor, weights: Tensor, rows: Tensor, out: Tensor) -> None:
    """See grouped.combine."""
    tokens, n = out.shape
    _combine[(tokens, triton.cdiv(n, _CHUNK))](
        y, weights, rows, out, n, TOP_K=rows.shape[1], CHUNK=_CHUNK
    )
