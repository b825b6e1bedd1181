"""Norm kernels: one program per row."""

from __future__ import annotations

import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow


@entry
def rms_norm_kernel(
    x, weight, out, n, stride, eps, BLOCK: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr
):
    """ONCE: a row fits into BLOCK columns and is read once."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    values = squares
    for start in range(0, n, BLOCK):
        at = start + cols
        values = tl.load(x + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
        squares += values * values
    inverse = tl.rsqrt(tl.sum(squares, 0) / n + eps)
    for start in range(0, n, BLOCK):
        at = start + cols
        if not ONCE:
            values = tl.load(x + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
        scaled = values * inverse * tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(out + row * n + at, scaled.to(out.dtype.element_ty), mask=at < n)


@entry
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    summed,
    n,
    stride_x,
    stride_residual,
    eps,
    BLOCK: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum is rounded to its dtype before it is normed; `summed` may be `residual`."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    values = squares
    for start in range(0, n, BLOCK):
        at = start + cols
        a = tl.load(x + row * stride_x + at, mask=at < n, other=0.0).to(tl.float32)
        b = tl.load(residual + row * stride_residual + at, mask=at < n, other=0.0)
        both = (a + b.to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + row * n + at, both, mask=at < n)
        values = both.to(tl.float32)
        squares += values * values
    inverse = tl.rsqrt(tl.sum(squares, 0) / n + eps)
    if not ONCE:
        tl.debug_barrier()  # what other threads summed is read below
    for start in range(0, n, BLOCK):
        at = start + cols
        if not ONCE:
            values = tl.load(summed + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        scaled = values * inverse * tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(out + row * n + at, scaled.to(out.dtype.element_ty), mask=at < n)
