"""Routed experts so narrow that one program holds a tile's activations, see jit/experts.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow
from ds_runtime_triton.jit.experts import tile_rows
from ds_runtime_triton.jit.gemm import product, row_side, token_side
from ds_runtime_triton.jit.quant import scale_of, to_codes
from ds_runtime_triton.jit.small import silu


@triton.jit
def hidden_part(
    x_rows,
    x_scales,
    rows,
    scales,
    to_up,
    to_up_scale,
    groups,
    tokens,
    UE8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SWAP: tl.constexpr,
):
    """(codes [BLOCK_M, BLOCK], scales [BLOCK_M]) of silu(x · gateᵀ) · (x · upᵀ) for BLOCK rows of
    gate, which begin at `rows`, and of up, `to_up` values behind."""
    gate = tl.zeros((BLOCK, BLOCK_M) if SWAP else (BLOCK_M, BLOCK), tl.float32)
    up = gate
    scale, gate_row, up_row = tl.load(x_scales), tl.load(scales), tl.load(scales + to_up_scale)
    for group in range(groups):
        start = group * BLOCK
        a = tl.load(x_rows + start)
        b, c = tl.load(rows + start), tl.load(rows + to_up + start)
        next = tl.minimum(group + 1, groups - 1)
        next_scale = tl.load(x_scales + next * tokens)
        next_gate, next_up = tl.load(scales + next), tl.load(scales + to_up_scale + next)
        gate += product(a, b, SWAP) * (token_side(scale, SWAP) * gate_row)
        up += product(a, c, SWAP) * (token_side(scale, SWAP) * up_row)
        scale, gate_row, up_row = next_scale, next_gate, next_up
    hidden = silu(gate) * up
    made = scale_of(hidden, 0 if SWAP else 1, UE8M0, x_rows.dtype.element_ty)
    codes = to_codes(hidden / token_side(made, SWAP), x_rows.dtype.element_ty)
    return tl.trans(codes) if SWAP else codes, made


@entry
def narrow_experts_kernel(
    x,
    x_scale,
    w,
    w_scale,
    low,
    low_scale,
    weights,
    out,
    order,
    owner,
    used,
    ids,
    pairs,
    tokens,
    K,
    stride_x,
    UE8M0: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Both matmuls of a tile: out [pairs, K], each row times its weight.

    w: [experts, 2, 2 · BLOCK, K], gate then up; low: [experts, K, 2 · BLOCK]; their scales by
    blocks of BLOCK by BLOCK. x [tokens, K] with x_scale [K / BLOCK, tokens]. BLOCK divides K.
    """
    follow(PDL)
    tile = tl.program_id(0)
    if tile < tl.load(used):
        expert, pair, real = tile_rows(order, owner, ids, tile, pairs, BLOCK_M, False)
        token = pair // TOP_K
        k = tl.arange(0, BLOCK)
        groups = K // BLOCK
        x_rows = x + token.to(tl.int64)[:, None] * stride_x + k[None, :]
        x_scales = x_scale + token
        rows = w + (expert * 4 * BLOCK + k)[:, None] * K + k[None, :]
        scales = w_scale + expert * 4 * groups
        to_up, to_up_scale = 2 * BLOCK * K, 2 * groups
        h0, s0 = hidden_part(
            x_rows, x_scales, rows, scales, to_up, to_up_scale, groups, tokens, UE8M0, BLOCK,
            BLOCK_M, SWAP,
        )  # fmt: skip
        h1, s1 = hidden_part(
            x_rows, x_scales, rows + BLOCK * K, scales + groups, to_up, to_up_scale, groups, tokens,
            UE8M0, BLOCK, BLOCK_M, SWAP,
        )  # fmt: skip
        weight = tl.load(weights + pair)
        s0 *= weight
        s1 *= weight
        low_rows = low + (expert * K + k)[:, None] * (2 * BLOCK) + k[None, :]
        low_scales = low_scale + expert * groups * 2
        to = out + token_side(pair, SWAP).to(tl.int64) * K + row_side(k, SWAP)
        mask = token_side(real, SWAP)
        r0, r1 = tl.load(low_scales), tl.load(low_scales + 1)
        for group in range(groups):
            at = low_rows + group * 2 * BLOCK * BLOCK
            b, c = tl.load(at), tl.load(at + BLOCK)
            next = tl.minimum(group + 1, groups - 1) * 2
            n0, n1 = tl.load(low_scales + next), tl.load(low_scales + next + 1)
            acc = product(h0, b, SWAP) * (token_side(s0, SWAP) * r0)
            acc += product(h1, c, SWAP) * (token_side(s1, SWAP) * r1)
            r0, r1 = n0, n1
            tl.store(to + group * BLOCK, acc.to(out.dtype.element_ty), mask=mask)
