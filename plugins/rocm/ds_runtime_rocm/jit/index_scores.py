"""Index scores, in TileLang: Σ_h relu(q_h · k_s) · weight_h over the pages of a row's sequence.

A program has one row and some blocks of tokens. Beyond what the row sees
its last token is read again.
"""

import tilelang
import tilelang.language as T

_PLAIN = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}


@tilelang.jit(pass_configs=_PLAIN)
def scores(heads, dim, page, dtype, block, blocks, stages, threads):
    """scores [rows, width] float32; what lies beyond a row's `lens` is left as it is."""
    rows, width = T.dynamic("rows"), T.dynamic("width")
    sequences, columns, pages = T.dynamic("sequences"), T.dynamic("columns"), T.dynamic("pages")

    @T.prim_func
    def kernel(
        q: T.Tensor((rows, heads, dim), dtype),
        weights: T.Tensor((rows, heads), "float32"),
        cache: T.Tensor((pages, page, dim), dtype),
        table: T.Tensor((sequences, columns), "int32"),
        owners: T.Tensor((rows,), "int32"),
        lens: T.Tensor((rows,), "int32"),
        out: T.Tensor((rows, width), "float32"),
    ):
        with T.Kernel(T.ceildiv(width, block * blocks), rows, threads=threads) as (b, r):
            queries = T.alloc_shared((heads, dim), dtype)
            keys = T.alloc_shared((block, dim), dtype)
            shares = T.alloc_shared((heads,), "float32")
            dots = T.alloc_fragment((block, heads), "float32")
            found = T.alloc_fragment((block,), "float32")
            seen = lens[r]
            first = b * (block * blocks)
            if first < seen:
                T.copy(q[r, 0, 0], queries, disable_tma=True)
                T.copy(weights[r, 0], shares, disable_tma=True)
                for step in T.Pipelined(blocks, num_stages=stages):
                    for i, d in T.Parallel(block, dim):
                        keys[i, d] = cache[
                            table[owners[r], T.min(first + step * block + i, seen - 1) // page],
                            T.min(first + step * block + i, seen - 1) % page,
                            d,
                        ]
                    T.clear(dots)
                    T.gemm(keys, queries, dots, transpose_B=True)
                    for i, h in T.Parallel(block, heads):
                        dots[i, h] = T.max(dots[i, h], 0.0) * shares[h]
                    T.reduce_sum(dots, found, dim=1)
                    for i in T.Parallel(block):
                        if first + step * block + i < seen:
                            out[r, first + step * block + i] = found[i]

    return kernel
