"""kv_b per head, in one packing [heads, nope + v, latent] for both directions of decode."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow


@triton.jit
def weight_tile(
    w,
    w_scale,
    row0,
    n,
    k,
    N,
    K,
    width,
    scale_width,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    UNIFORM: tl.constexpr,
    DOWN: tl.constexpr,
    EVEN: tl.constexpr,
    dtype: tl.constexpr,
):
    """W_h(n, k), of UNIFORM tiles without their scale: [k, n] of `dtype`. See absorb_kernel."""
    row = row0 + (n[:, None] if DOWN else k[:, None])
    col = k[None, :] if DOWN else n[None, :]
    at = w + row.to(tl.int64) * width + col
    if EVEN:
        b = tl.load(at)
    else:
        mask = (n < N)[:, None] & (k < K)[None, :] if DOWN else (k < K)[:, None] & (n < N)[None, :]
        b = tl.load(at, mask=mask, other=0.0)
    if GROUP_K > 0 and not UNIFORM:
        scale = w_scale + (row // GROUP_N) * scale_width + col // GROUP_K
        if EVEN:
            b = b.to(tl.float32) * tl.load(scale)
        else:
            b = b.to(tl.float32) * tl.load(scale, mask=mask, other=0.0)
    b = b.to(dtype)
    return tl.trans(b) if DOWN else b


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
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
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
    tile lies in one of these blocks. Not DOWN: after [tokens, heads, rest] is copied to out[t, h,
    N:]. REST ≥ rest. EVEN: tiles of w end where N and K do. TILES: of tokens that a program takes
    with the same tile of w, BLOCK_K then being at least K; 0: one, in steps of BLOCK_K.
    """
    follow(PDL)
    head = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row0 = head * head_rows + first
    scale = 1.0
    if TILES > 0:
        b = weight_tile(
            w, w_scale, row0, n, k, N, K, width, scale_width,
            GROUP_N, GROUP_K, UNIFORM, DOWN, EVEN, x.dtype.element_ty,
        )  # fmt: skip
        if GROUP_K > 0 and UNIFORM:
            across = tl.program_id(1) * BLOCK_N
            top, left = row0 + (across if DOWN else 0), 0 if DOWN else across
            scale = tl.load(w_scale + (top // GROUP_N) * scale_width + left // GROUP_K)
    each: tl.constexpr = TILES if TILES > 0 else 1
    for tile in range(each):
        m = (tl.program_id(2) * each + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        x_rows = x + tl.minimum(m, tokens - 1).to(tl.int64)[:, None] * x_token + head * x_head
        if not DOWN and tl.program_id(1) == 0:
            at = tl.arange(0, REST)
            mask = (m < tokens)[:, None] & (at < rest)[None, :]
            rows = m.to(tl.int64)[:, None]
            copied = tl.load(
                behind + rows * behind_token + head * behind_head + at[None, :], mask=mask, other=0
            )
            tl.store(out + rows * out_token + head * out_head + N + at[None, :], copied, mask=mask)
        if TILES > 0:
            if EVEN:
                a = tl.load(x_rows + k[None, :])
            else:
                a = tl.load(x_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            if SWAP:
                acc = tl.dot(tl.trans(b), tl.trans(a), input_precision="ieee") * scale
            else:
                acc = tl.dot(a, b, input_precision="ieee") * scale
        else:
            acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, K, BLOCK_K):
                at = start + k
                if EVEN:
                    a = tl.load(x_rows + at[None, :])
                else:
                    a = tl.load(x_rows + at[None, :], mask=(at < K)[None, :], other=0.0)
                c = weight_tile(
                    w, w_scale, row0, n, at, N, K, width, scale_width,
                    GROUP_N, GROUP_K, UNIFORM, DOWN, EVEN, x.dtype.element_ty,
                )  # fmt: skip
                if SWAP:
                    part = tl.dot(tl.trans(c), tl.trans(a), input_precision="ieee")
                else:
                    part = tl.dot(a, c, input_precision="ieee")
                if GROUP_K > 0 and UNIFORM:
                    across = tl.program_id(1) * BLOCK_N
                    top = row0 + (across if DOWN else start)
                    left = start if DOWN else across
                    part *= tl.load(w_scale + (top // GROUP_N) * scale_width + left // GROUP_K)
                acc += part
        if SWAP:
            to = out + m.to(tl.int64)[None, :] * out_token + head * out_head + n[:, None]
            mask = (m < tokens)[None, :] & (n < N)[:, None]
        else:
            to = out + m.to(tl.int64)[:, None] * out_token + head * out_head + n[None, :]
            mask = (m < tokens)[:, None] & (n < N)[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


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
