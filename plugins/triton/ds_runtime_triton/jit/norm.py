"""Norm kernels: one program per row."""

from __future__ import annotations

import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.quant import scale_of, to_codes


@entry
def rms_norm_kernel(
    x,
    weight,
    out,
    n,
    stride,
    eps,
    residual,
    summed,
    stride_residual,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """ONCE: a row fits into BLOCK columns and is read once. ADD: as rms_norm_quantise_kernel."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    values = squares
    for start in range(0, n, BLOCK):
        at = start + cols
        values = tl.load(x + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
        if ADD:
            other = tl.load(residual + row * stride_residual + at, mask=at < n, other=0.0)
            both = (values + other.to(tl.float32)).to(summed.dtype.element_ty)
            tl.store(summed + row * n + at, both, mask=at < n)
            values = both.to(tl.float32)
        squares += values * values
    inverse = tl.rsqrt(tl.sum(squares, 0) / n + eps)
    first, stride_first = x, stride
    if ADD:
        first, stride_first = summed, n
        if not ONCE:
            tl.debug_barrier()  # what other threads summed is read below
    for start in range(0, n, BLOCK):
        at = start + cols
        if not ONCE:
            values = tl.load(first + row * stride_first + at, mask=at < n, other=0.0)
            values = values.to(tl.float32)
        scaled = values * inverse * tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(out + row * n + at, scaled.to(out.dtype.element_ty), mask=at < n)


@entry
def rms_norm_quantise_kernel(
    x,
    weight,
    q,
    scale,
    n,
    stride,
    stride_scale_row,
    stride_scale_group,
    eps,
    residual,
    summed,
    stride_residual,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    ONCE: tl.constexpr,
    UE8M0: tl.constexpr,
    PDL: tl.constexpr,
):
    """GROUPS groups of a row at a time, WIDTH being GROUP rounded up to a power of two. The norm is
    rounded to the dtype of x. ONCE: a row is read once. ADD: `residual` is added first, the sum
    rounded and written to `summed`, which may be `residual`."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, inside = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    cols = group * GROUP + inside
    squares = tl.zeros((GROUPS, WIDTH), tl.float32)
    values = squares
    for start in range(0, n, GROUPS * GROUP):
        mask = (inside < GROUP) & (start + cols < n)
        values = tl.load(x + row * stride + start + cols, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            other = tl.load(residual + row * stride_residual + start + cols, mask=mask, other=0.0)
            both = (values + other.to(tl.float32)).to(summed.dtype.element_ty)
            tl.store(summed + row * n + start + cols, both, mask=mask)
            values = both.to(tl.float32)
        squares += values * values
    inverse = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / n + eps)
    first, stride_first = x, stride
    if ADD:
        first, stride_first = summed, n
        if not ONCE:
            tl.debug_barrier()  # what other threads summed is read below
    for start in range(0, n, GROUPS * GROUP):
        mask = (inside < GROUP) & (start + cols < n)
        if not ONCE:
            values = tl.load(first + row * stride_first + start + cols, mask=mask, other=0.0)
            values = values.to(tl.float32)
        factor = tl.load(weight + start + cols, mask=mask, other=0.0).to(tl.float32)
        normed = (values * inverse * factor).to(x.dtype.element_ty).to(tl.float32)
        scales = scale_of(normed, 1, UE8M0, q.dtype.element_ty)
        codes = to_codes(normed / scales[:, None], q.dtype.element_ty)
        tl.store(q + row * n + start + cols, codes, mask=mask)
        place = start // GROUP + tl.arange(0, GROUPS)
        at = scale + row * stride_scale_row + place * stride_scale_group
        tl.store(at, scales, mask=place * GROUP < n)
