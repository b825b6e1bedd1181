"""kv_b per head, in one packing [heads, nope + v, latent] for both directions of decode."""

from __future__ import annotations

import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow


@entry
def absorb_kernel(
    x,
    w,
    w_scale,
    behind,
    out,
    tokens,
    N,
    K,
    first,
    head_rows,
    width,
    rest,
    x_token,
    x_head,
    behind_token,
    behind_head,
    out_token,
    out_head,
    scale_width,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    UNIFORM: tl.constexpr,
    DOWN: tl.constexpr,
    REST: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, h, n] = Σ_k x[t, h, k] · W_h(n, k), K and N being the inner and the outer width.

    The rows [first, …) of a head's part of w [heads · head_rows, width] are used. DOWN: n goes over
    rows and k over columns; otherwise k over rows and n over columns. GROUP_K: 0 for a dense w,
    else w is e4m3 with w_scale [⌈rows / GROUP_N⌉, scale_width], a column per GROUP_K; UNIFORM: a
    tile lies in one of these blocks. Not DOWN: behind [tokens, heads, rest] is copied to out[t, h,
    N:]. REST ≥ rest.
    """
    follow(PDL)
    head = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + tl.minimum(m, tokens - 1).to(tl.int64)[:, None] * x_token + head * x_head
    row0 = head * head_rows + first
    if not DOWN and tl.program_id(1) == 0:
        at = tl.arange(0, REST)
        mask = (m < tokens)[:, None] & (at < rest)[None, :]
        rows = m.to(tl.int64)[:, None]
        copied = tl.load(
            behind + rows * behind_token + head * behind_head + at[None, :], mask=mask, other=0.0
        )
        tl.store(out + rows * out_token + head * out_head + N + at[None, :], copied, mask=mask)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k
        a = tl.load(x_rows + at[None, :], mask=(at < K)[None, :], other=0.0)
        row = row0 + (n[:, None] if DOWN else at[:, None])
        col = at[None, :] if DOWN else n[None, :]
        mask = (
            (n < N)[:, None] & (at < K)[None, :] if DOWN else (at < K)[:, None] & (n < N)[None, :]
        )
        b = tl.load(w + row.to(tl.int64) * width + col, mask=mask, other=0.0)
        if GROUP_K > 0 and not UNIFORM:
            scale = w_scale + (row // GROUP_N) * scale_width + col // GROUP_K
            b = b.to(tl.float32) * tl.load(scale, mask=mask, other=0.0)
        b = b.to(x.dtype.element_ty)
        if DOWN:
            b = tl.trans(b)  # [k, n]
        if SWAP:
            part = tl.dot(tl.trans(b), tl.trans(a), input_precision="ieee")
        else:
            part = tl.dot(a, b, input_precision="ieee")
        if GROUP_K > 0 and UNIFORM:
            across = tl.program_id(1) * BLOCK_N
            top = row0 + (across if DOWN else start)
            left = start if DOWN else across
            part *= tl.load(w_scale + (top // GROUP_N) * scale_width + left // GROUP_K)
        acc += part
    if SWAP:
        to = out + m.to(tl.int64)[None, :] * out_token + head * out_head + n[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=(m < tokens)[None, :] & (n < N)[:, None])
    else:
        to = out + m.to(tl.int64)[:, None] * out_token + head * out_head + n[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=(m < tokens)[:, None] & (n < N)[None, :])


@entry
def widen_kernel(
    w,
    scale,
    out,
    rows,
    cols,
    scale_width,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """FP8 values times their scales, as out's dtype: [rows, cols]."""
    follow(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    values = tl.load(w + at, mask=mask, other=0.0).to(tl.float32)
    place = scale + (row // GROUP_N)[:, None] * scale_width + (col // GROUP_K)[None, :]
    values *= tl.load(place, mask=mask, other=0.0)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)
