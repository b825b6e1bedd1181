"""Attention over chosen slots, in TileLang.

A program has one row, some heads and a share of the row's slots; shares are joined by a second
kernel. Slots below 0 are no token: outside of a tensor TileLang reads zeros, which weigh nothing.
"""

import tilelang
import tilelang.language as T

LOG2E = 1.4426950408889634
LOW = -1.0e30  # below every score, and finite: a difference of two is 0
FLOOR = LOW / 2  # where maxima begin: a score of LOW weighs nothing beside it
_PLAIN = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}
_GROUPS = {  # of kernels that synchronize by barriers of their own
    **_PLAIN,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
}


@tilelang.jit(pass_configs=_PLAIN)
def shares(heads, latent, rope, dtype, out_dtype, heads_block, block, stages, threads, scale):
    """Of each share its output [shares, rows, heads, latent] and its log₂-sum-exp₂ [shares,
    rows, heads]. `each`: slots of a share, a multiple of `block`; shares · each = count.
    """
    rows, count = T.dynamic("rows"), T.dynamic("count")
    many, tokens = T.dynamic("many"), T.dynamic("tokens")

    @T.prim_func
    def kernel(
        q: T.Tensor((rows, heads, latent + rope), dtype),
        cache: T.Tensor((tokens, latent + rope), dtype),
        slots: T.Tensor((rows, count), "int32"),
        out: T.Tensor((many, rows, heads, latent), out_dtype),
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
            T.copy(q[r, hb * heads_block, 0], q_latent, disable_tma=True)
            T.copy(q[r, hb * heads_block, latent], q_rope, disable_tma=True)
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


@tilelang.jit(pass_configs=_GROUPS)
def wide(heads, latent, rope, dtype, out_dtype, heads_block, block, stages, threads, scale):
    """As `shares`, for compute capability 9.0, 64 heads that divide `heads` and 64 of `rope`.

    Of three warpgroups the first scores a tile and weighs the left half of the values, the second
    weighs the right half, the third fetches. A tile is fetched while the one before is computed.
    """
    rows, count = T.dynamic("rows"), T.dynamic("count")
    many, tokens = T.dynamic("many"), T.dynamic("tokens")
    group, half = threads // 3, latent // 2
    log = scale * LOG2E
    lines = group // 8  # rows that the third warpgroup fetches at once, 16 bytes a thread

    @T.prim_func
    def kernel(
        q: T.Tensor((rows, heads, latent + rope), dtype),
        cache: T.Tensor((tokens, latent + rope), dtype),
        slots: T.Tensor((rows, count), "int32"),
        out: T.Tensor((many, rows, heads, latent), out_dtype),
        lse: T.Tensor((many, rows, heads), "float32"),
        each: T.int32,
    ):
        with T.Kernel(heads // heads_block, many, rows, threads=threads) as (hb, s, r):
            q_left = T.alloc_shared((heads_block, half), dtype)
            q_right = T.alloc_shared((heads_block, half), dtype)
            q_rope = T.alloc_shared((heads_block, rope), dtype)
            left = T.alloc_shared((stages, block, half), dtype)
            right = T.alloc_shared((stages, block, half), dtype)
            k_rope = T.alloc_shared((stages, block, rope), dtype)
            weights = T.alloc_shared((heads_block, block), dtype)
            factors = T.alloc_shared((heads_block,), "float32")
            bias = T.alloc_shared((stages, block), "float32")
            scores = T.alloc_fragment((heads_block, block), "float32")
            total_left = T.alloc_fragment((heads_block, half), "float32")
            total_right = T.alloc_fragment((heads_block, half), "float32")
            most = T.alloc_fragment((heads_block,), "float32")
            before = T.alloc_fragment((heads_block,), "float32")
            factor = T.alloc_fragment((heads_block,), "float32")
            part = T.alloc_fragment((heads_block,), "float32")
            mass = T.alloc_fragment((heads_block,), "float32")
            slot = T.alloc_local((block // lines,), "int32")
            asked = T.alloc_barrier(group)
            # Of each thread that fetches: its copies and its bias.
            left_here = T.alloc_barrier([2 * group] * stages)
            left_free = T.alloc_barrier([group] * stages)
            right_here = T.alloc_barrier([group] * stages)
            right_free = T.alloc_barrier([group] * stages)
            known = T.alloc_barrier(group)  # the factors
            weighed = T.alloc_barrier(group)  # the weights
            used = T.alloc_barrier(2 * group)  # by both: weights and factors
            t = T.get_thread_binding()
            steps = T.ceildiv(each, block)
            if t < group:
                T.set_max_nreg(240, 1)
                T.fill(total_left, 0)
                T.fill(mass, 0)
                T.fill(most, FLOOR)
                T.barrier_wait(asked, 0)
                for step in T.serial(steps):
                    k = step % stages
                    T.barrier_wait(left_here[k], step // stages & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_left, left[k, :, :], scores, transpose_B=True, clear_accum=True)
                    T.wgmma_gemm(q_rope, k_rope[k, :, :], scores, transpose_B=True)
                    if step > 0:
                        T.wait_wgmma(2)  # for the values of the tile before
                        T.barrier_arrive(left_free[(step - 1) % stages])
                        T.barrier_arrive(used)
                    T.barrier_wait(right_here[k], step // stages & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(q_right, right[k, :, :], scores, transpose_B=True)
                    T.copy(most, before)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(scores, num_regs=heads_block * block // group)
                    T.warpgroup_fence_operand(total_left, num_regs=heads_block * half // group)
                    for h, i in T.Parallel(heads_block, block):
                        scores[h, i] += bias[k, i]
                    T.reduce_max(scores, most, dim=1, clear=False)
                    for h in T.Parallel(heads_block):
                        factor[h] = T.exp2((before[h] - most[h]) * log)
                    T.barrier_wait(used, step & 1 ^ 1)
                    T.copy(factor, factors)
                    T.barrier_arrive(known)
                    for h, i in T.Parallel(heads_block, block):
                        scores[h, i] = T.exp2(scores[h, i] * log - most[h] * log)
                    T.copy(scores, weights)
                    T.fence_proxy_async()
                    T.barrier_arrive(weighed)
                    for h, d in T.Parallel(heads_block, half):
                        total_left[h, d] *= factor[h]
                    T.barrier_wait(weighed, step & 1)
                    T.wgmma_gemm(weights, left[k, :, :], total_left)
                    T.reduce_sum(scores, part, dim=1)
                    for h in T.Parallel(heads_block):
                        mass[h] = mass[h] * factor[h] + part[h]
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(total_left, num_regs=heads_block * half // group)
                T.barrier_arrive(used)
                T.barrier_wait(used, steps & 1 ^ 1)
                for h in T.Parallel(heads_block):
                    factor[h] = T.if_then_else(mass[h] > 0, 1.0 / mass[h], 0.0)
                T.copy(factor, factors)
                T.barrier_arrive(known)
                for h, d in T.Parallel(heads_block, half):
                    out[s, r, hb * heads_block + h, d] = total_left[h, d] * factor[h]
                for h in T.Parallel(heads_block):
                    lse[s, r, hb * heads_block + h] = T.if_then_else(
                        mass[h] > 0, T.log2(mass[h]) + most[h] * log, LOW
                    )
            elif t < 2 * group:
                T.set_max_nreg(184, 1)
                T.fill(total_right, 0)
                for step in T.serial(steps):
                    k = step % stages
                    T.barrier_wait(known, step & 1)
                    for h, d in T.Parallel(heads_block, half):
                        total_right[h, d] *= factors[h]
                    T.barrier_wait(weighed, step & 1)
                    T.barrier_wait(right_here[k], step // stages & 1)
                    T.fence_proxy_async()
                    T.wgmma_gemm(weights, right[k, :, :], total_right)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(total_right, num_regs=heads_block * half // group)
                    T.barrier_arrive(right_free[k])
                    T.barrier_arrive(used)
                T.barrier_wait(known, steps & 1)
                for h, d in T.Parallel(heads_block, half):
                    out[s, r, hb * heads_block + h, half + d] = total_right[h, d] * factors[h]
            else:
                T.set_max_nreg(72, 0)
                row = (t - 2 * group) // 8
                column = t % 8 * 8
                for i in T.unroll(heads_block // lines):
                    for d in T.unroll(0, half, 64):
                        T.ptx_cp_async(
                            T.access_ptr(q_left[i * lines + row, d + column], "w", 8),
                            T.access_ptr(
                                q[r, hb * heads_block + i * lines + row, d + column], "r", 8
                            ),
                            8,
                        )
                        T.ptx_cp_async(
                            T.access_ptr(q_right[i * lines + row, d + column], "w", 8),
                            T.access_ptr(
                                q[r, hb * heads_block + i * lines + row, half + d + column], "r", 8
                            ),
                            8,
                        )
                    T.ptx_cp_async(
                        T.access_ptr(q_rope[i * lines + row, column], "w", 8),
                        T.access_ptr(
                            q[r, hb * heads_block + i * lines + row, latent + column], "r", 8
                        ),
                        8,
                    )
                T.cp_async_barrier_noinc(asked)
                for step in T.serial(steps):
                    k = step % stages
                    for i in T.unroll(block // lines):
                        slot[i] = slots[r, s * each + step * block + i * lines + row]
                    T.barrier_wait(left_free[k], step // stages & 1 ^ 1)
                    for i in T.unroll(block // lines):
                        for d in T.unroll(0, half, 64):
                            T.ptx_cp_async(
                                T.access_ptr(left[k, i * lines + row, d + column], "w", 8),
                                T.access_ptr(cache[T.max(slot[i], 0), d + column], "r", 8),
                                8,
                                slot[i] >= 0,
                            )
                        T.ptx_cp_async(
                            T.access_ptr(k_rope[k, i * lines + row, column], "w", 8),
                            T.access_ptr(cache[T.max(slot[i], 0), latent + column], "r", 8),
                            8,
                            slot[i] >= 0,
                        )
                        if column == 0:
                            bias[k, i * lines + row] = T.if_then_else(slot[i] >= 0, 0.0, LOW)
                    T.barrier_arrive(left_here[k])
                    T.cp_async_barrier_noinc(left_here[k])
                    T.barrier_wait(right_free[k], step // stages & 1 ^ 1)
                    for i in T.unroll(block // lines):
                        for d in T.unroll(0, half, 64):
                            T.ptx_cp_async(
                                T.access_ptr(right[k, i * lines + row, d + column], "w", 8),
                                T.access_ptr(cache[T.max(slot[i], 0), half + d + column], "r", 8),
                                8,
                                slot[i] >= 0,
                            )
                    T.cp_async_barrier_noinc(right_here[k])

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
