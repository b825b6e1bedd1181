"""FP8 e4m3 quantisation of activations: the scale of a group, and a kernel that applies it."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """fp32 values in [−448, 448] after clamping, as e4m3."""
    return tl.minimum(tl.maximum(values, -448.0), 448.0).to(dtype)


@triton.jit
def quantise_kernel(
    x,
    q,
    scale,
    rows,
    n,
    stride,
    stride_scale_row,
    stride_scale_group,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    UE8M0: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows of one group. WIDTH: GROUP rounded up to a power of two. The last group of a
    row may be short."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    inside = tl.arange(0, WIDTH)
    cols = group * GROUP + inside
    mask = (row < rows)[:, None] & ((inside < GROUP) & (cols < n))[None, :]
    values = tl.load(x + row[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    scales = group_scale(tl.max(tl.abs(values), 1), UE8M0)  # [BLOCK]
    made = to_fp8(values / scales[:, None], q.dtype.element_ty)
    tl.store(q + row[:, None] * n + cols[None, :], made, mask=mask)
    place = scale + row * stride_scale_row + group * stride_scale_group
    tl.store(place, scales, mask=row < rows)
