"""Embedding, activation and merging of partial attentions: element by element."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.quant import scale_of, to_codes


@entry
def embed_kernel(ids, table, out, start, rows, n, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One block of columns of one token's row; zeros for ids that the table does not hold."""
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token) - start
    held = tl.where((row >= 0) & (row < rows), n, 0)  # columns to read
    values = tl.load(table + row * stride + cols, mask=cols < held, other=0.0)
    tl.store(out + token * n + cols, values, mask=cols < n)


@triton.jit
def silu(x):
    """x · sigmoid(x) in fp32."""
    return x / (1.0 + tl.exp(-x))


@entry
def silu_mul_kernel(gate_up, out, n, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One block of columns of one row: gate in the first n columns, up in the next."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = gate_up + row * stride + cols
    gate = tl.load(place, mask=cols < n, other=0.0).to(tl.float32)
    up = tl.load(place + n, mask=cols < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + cols, (silu(gate) * up).to(out.dtype.element_ty), mask=cols < n)


@entry
def silu_mul_quantise_kernel(
    gate_up,
    q,
    scale,
    n,
    stride,
    stride_scale_row,
    stride_scale_group,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    UE8M0: tl.constexpr,
    PDL: tl.constexpr,
):
    """GROUPS groups of one row, WIDTH being GROUP rounded up to a power of two. The product is
    rounded to the dtype of gate_up."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, WIDTH)[None, :]
    cols = group[:, None] * GROUP + inside
    mask = (inside < GROUP) & (cols < n)
    place = gate_up + row * stride + cols
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + n, mask=mask, other=0.0).to(tl.float32)
    made = (silu(gate) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    scales = scale_of(made, 1, UE8M0, q.dtype.element_ty)
    tl.store(q + row * n + cols, to_codes(made / scales[:, None], q.dtype.element_ty), mask=mask)
    at = scale + row * stride_scale_row + group * stride_scale_group
    tl.store(at, scales, mask=group * GROUP < n)


@entry
def merge_state_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    pairs,
    heads,
    d,
    token_a,
    head_a,
    token_b,
    head_b,
    lse_token_a,
    lse_head_a,
    lse_token_b,
    lse_head_b,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """PAIRS heads of tokens, of `pairs` in all. The names after `d` are strides."""
    follow(PDL)
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    token, head = pair // heads, pair % heads
    there = pair < pairs
    cols = tl.arange(0, BLOCK)[None, :]
    mask = there[:, None] & (cols < d)
    a = tl.load(lse_a + token * lse_token_a + head * lse_head_a, mask=there, other=0.0)
    b = tl.load(lse_b + token * lse_token_b + head * lse_head_b, mask=there, other=0.0)
    at_a = (token * token_a + head * head_a)[:, None] + cols
    at_b = (token * token_b + head * head_b)[:, None] + cols
    value_a = tl.load(out_a + at_a, mask=mask, other=0.0).to(tl.float32)
    value_b = tl.load(out_b + at_b, mask=mask, other=0.0).to(tl.float32)
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)  # without keys exp(−inf − 0) is 0
    weight_a, weight_b = tl.exp(a - base), tl.exp(b - base)
    total = weight_a + weight_b
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    merged = (value_a * weight_a[:, None] + value_b * weight_b[:, None]) * share[:, None]
    tl.store(out + pair[:, None] * d + cols, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + pair, base + tl.log(total), mask=there)
