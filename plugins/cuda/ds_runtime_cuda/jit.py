"""Triton kernels of quant.py and grouped.py. Imported on a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # channels that one program holds: 8 groups


@triton.jit
def _scaled(values, POWERS: tl.constexpr):
    """(e4m3 [groups, 128], scales [groups]) of [groups, 128] values."""
    largest = tl.max(tl.abs(values), axis=1)
    # Quotients that are rounded another way would fall to another neighbour at every tie.
    scale = tl.div_rn(tl.maximum(largest, 1e-4), tl.full(largest.shape, 448.0, tl.float32))
    if POWERS:  # as quant.power_above
        bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF
        scale = (bits & -0x800000).to(tl.float32, bitcast=True)
    q = tl.clamp(tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)), -448.0, 448.0)
    return q.to(tl.float8e4nv), scale


@triton.jit
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
            x, q, scale, n, x.stride(0), scale.stride(1), POWERS=powers, CHUNK=_CHUNK
        )


@triton.jit
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
        tl.store(q + row * n + at, coded, mask=inside)
        tl.store(scale + group * scale_column + row, sizes, mask=group * 128 < n)


def quantise_to(x: Tensor, rows: Tensor, q: Tensor, scale: Tensor, powers: bool = False) -> None:
    """See grouped.scatter."""
    tokens, n = x.shape
    _scatter[(tokens, triton.cdiv(n, _CHUNK))](
        x, rows, q, scale, n, x.stride(0), scale.stride(1), TOP_K=rows.shape[1], POWERS=powers,
        CHUNK=_CHUNK,
    )  # fmt: skip


@triton.jit
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
        gate_up, owner, q, scale, n, scale.stride(1), POWERS=powers, CHUNK=_CHUNK
    )


@triton.jit
def _combine(y, weights, rows, out, n, TOP_K: tl.constexpr, CHUNK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < n
    total = tl.zeros((CHUNK,), tl.float32)
    for i in range(TOP_K):
        row = tl.load(rows + token * TOP_K + i).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + i)
        total += weight * tl.load(y + row * n + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * n + at, total.to(out.dtype.element_ty), mask=inside)


def combine_rows(y: Tensor, weights: Tensor, rows: Tensor, out: Tensor) -> None:
    """See grouped.combine."""
    tokens, n = out.shape
    _combine[(tokens, triton.cdiv(n, _CHUNK))](
        y, weights, rows, out, n, TOP_K=rows.shape[1], CHUNK=_CHUNK
    )
