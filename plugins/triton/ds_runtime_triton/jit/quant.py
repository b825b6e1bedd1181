"""Quantisation of activations to FP8 e4m3 or int8: scales of groups, and a kernel for both."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow


@triton.jit
def group_scale(amax, UE8M0: tl.constexpr):
    """max(amax, 1e-4) / 448 in fp32, rounded up to a power of two if UE8M0."""
    scale = tl.maximum(amax, 1e-4) / 448.0
    if UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def to_fp8(values, dtype: tl.constexpr):
    """fp32 values in [−448, 448] after clamping, as e4m3; NaN stays NaN."""
    least = tl.maximum(values, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(least, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def scale_of(values, axis: tl.constexpr, UE8M0: tl.constexpr, dtype: tl.constexpr):
    """Scales of fp32 values along an axis. int8: max |value| / 127, NaN if one is, which integers
    could not hold."""
    amax = tl.max(tl.abs(values), axis)
    if dtype == tl.int8:
        lost = tl.max((values != values).to(tl.int32), axis)
        return tl.where(lost > 0, float("nan"), tl.maximum(amax, 1e-30) / 127.0)
    else:
        return group_scale(amax, UE8M0)


@triton.jit
def to_codes(values, dtype: tl.constexpr):
    """fp32 values over their scale, as e4m3 or int8."""
    if dtype == tl.int8:
        return tl.floor(tl.minimum(tl.maximum(values, -127.0), 127.0) + 0.5).to(dtype)
    else:
        return to_fp8(values, dtype)


@entry
def quantise_kernel(
    x,
    q,
    scale,
    less,
    rows,
    n,
    stride,
    stride_scale_row,
    stride_scale_group,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    UE8M0: tl.constexpr,
    FOR_INT4: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK rows of one group. WIDTH: GROUP rounded up to a power of two. The last group of a
    row may be short.

    FOR_INT4: for products with int4 codes that are read as e4m3 numbers code · 2^-9. scale is 2^9
    times as large, and less is what 8 too much in every code adds: 8 · scale · Σ q.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    inside = tl.arange(0, WIDTH)
    cols = group * GROUP + inside
    mask = (row < rows)[:, None] & ((inside < GROUP) & (cols < n))[None, :]
    values = tl.load(x + row[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    scales = scale_of(values, 1, UE8M0, q.dtype.element_ty)  # [BLOCK]
    made = to_codes(values / scales[:, None], q.dtype.element_ty)
    tl.store(q + row[:, None] * n + cols[None, :], made, mask=mask)
    place = row * stride_scale_row + group * stride_scale_group
    if FOR_INT4:
        added = scales * (8.0 * tl.sum(made.to(tl.float32), 1))
        tl.store(less + place, added, mask=row < rows)
        scales *= 512.0
    tl.store(scale + place, scales, mask=row < rows)
