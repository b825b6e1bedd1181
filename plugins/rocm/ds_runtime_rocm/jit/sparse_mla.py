"""Attention over chosen slots, in TileLang.

A program has one row, some heads and a share of the row's slots; shares are joined by a second
kernel. Slots below 0 are no token: outside of a tensor TileLang reads zeros, which weigh nothing.
"""

import tilelang
import tilelang.language as T

LOG2E = 1.4426950408889634
LOW = -1.0e30  # below every score, and finite: a difference of two is 0
_PLAIN = {
    tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
}


@tilelang.jit(pass_configs=_PLAIN)
def shares(heads, latent, rope, dtype, heads_block, block, stages, threads, scale):
    """Of each share its output [shares, rows, heads, latent] float32 and its log₂-sum-exp₂ [shares,
    rows, heads]. `each`: slots of a share, a multiple of `block`; shares · each = count.
    """
    rows, count = T.dynamic("rows"), T.dynamic("count")
    many, tokens = T.dynamic("many"), T.dynamic("tokens")

    @T.prim_func
    def kernel(
        q: T.Tensor((rows, heads, latent + rope), dtype),
        cache: T.Tensor((tokens, latent + rope), dtype),
        slots: T.Tensor((rows, count), "int32"),
        out: T.Tensor((many, rows, heads, latent), "float32"),
        lse: T.Tensor((many, rows, heads), "float32"),
        each: T.int32,
    ):
        with T.Kernel(T.ceildiv(heads, heads_block), many, rows, threads=threads) as (hb, s, r):
            q_latent = T.alloc_shared((heads_block, latent), dtype)
            q_rope = T.alloc_shared((heads_block, rope), dtype)
            k_latent = T.alloc_shared((block, latent), dtype)
            k_rope = T.alloc_shared((block, rope), dtype)
            weights = T.alloc_shared((heads_block, block), dtype)
            scores = T.alloc_fragment((heads_block, block), "float32")
            total = T.alloc_fragment((heads_block, latent), "float32")
            most = T.alloc_fragment((heads_block,), "float32")
            before = T.alloc_fragment((heads_block,), "float32")
            factor = T.alloc_fragment((heads_block,), "float32")
            part = T.alloc_fragment((heads_block,), "float32")
            mass = T.alloc_fragment((heads_block,), "float32")
            T.fill(total, 0)
            T.fill(mass, 0)
            T.fill(most, LOW)
            T.copy(q[r, hb * heads_block, 0], q_latent)
            T.copy(q[r, hb * heads_block, latent], q_rope)
            for step in T.Pipelined(T.ceildiv(each, block), num_stages=stages):
                first = s * each + step * block
                for i, d in T.Parallel(block, latent):
                    k_latent[i, d] = cache[slots[r, first + i], d]
                for i, d in T.Parallel(block, rope):
                    k_rope[i, d] = cache[slots[r, first + i], latent + d]
                for h, i in T.Parallel(heads_block, block):
                    scores[h, i] = T.if_then_else(slots[r, first + i] >= 0, 0.0, LOW)
                T.gemm(q_latent, k_latent, scores, transpose_B=True)
                T.gemm(q_rope, k_rope, scores, transpose_B=True)
                T.copy(most, before)
                T.reduce_max(scores, most, dim=1, clear=False)
                for h in T.Parallel(heads_block):
                    factor[h] = T.exp2((before[h] - most[h]) * (scale * LOG2E))
                for h, i in T.Parallel(heads_block, block):
                    scores[h, i] = T.if_then_else(
                        scores[h, i] <= LOW * 0.5,
                        0.0,
                        T.exp2((scores[h, i] - most[h]) * (scale * LOG2E)),
                    )
                T.reduce_sum(scores, part, dim=1)
                for h in T.Parallel(heads_block):
                    mass[h] = mass[h] * factor[h] + part[h]
                for h, d in T.Parallel(heads_block, latent):
                    total[h, d] = total[h, d] * factor[h]
                T.copy(scores, weights)
                T.gemm(weights, k_latent, total)
            for h, d in T.Parallel(heads_block, latent):
                if hb * heads_block + h < heads:
                    out[s, r, hb * heads_block + h, d] = T.if_then_else(
                        mass[h] > 0, total[h, d] / mass[h], 0.0
                    )
            for h in T.Parallel(heads_block):
                if hb * heads_block + h < heads:
                    lse[s, r, hb * heads_block + h] = T.if_then_else(
                        mass[h] > 0, T.log2(mass[h]) + most[h] * (scale * LOG2E), LOW
                    )

    return kernel


@tilelang.jit(pass_configs=_PLAIN)
def join(heads, latent, dtype, threads):
    """The shares' outputs, weighed: [rows, heads, latent]."""
    rows, many = T.dynamic("rows"), T.dynamic("many")

    @T.prim_func
    def kernel(
        parts: T.Tensor((many, rows, heads, latent), "float32"),
        lse: T.Tensor((many, rows, heads), "float32"),
        out: T.Tensor((rows, heads, latent), dtype),
    ):
        with T.Kernel(heads, rows, threads=threads) as (h, r):
            total = T.alloc_fragment((latent,), "float32")
            most = T.alloc_local((1,), "float32")
            mass = T.alloc_local((1,), "float32")
            weight = T.alloc_local((1,), "float32")
            T.fill(total, 0)
            most[0] = LOW
            mass[0] = 0.0
            for s in T.serial(many):
                most[0] = T.max(most[0], lse[s, r, h])
            for s in T.serial(many):
                weight[0] = T.if_then_else(
                    lse[s, r, h] <= LOW * 0.5, 0.0, T.exp2(lse[s, r, h] - most[0])
                )
                mass[0] += weight[0]
                for d in T.Parallel(latent):
                    total[d] += weight[0] * parts[s, r, h, d]
            for d in T.Parallel(latent):
                out[r, h, d] = T.if_then_else(mass[0] > 0, total[d] / mass[0], 0.0)

    return kernel
