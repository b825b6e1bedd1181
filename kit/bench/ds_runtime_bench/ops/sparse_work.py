"""What a call of sparse attention's ops must at least move and compute. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ds_runtime_bench.ops.work import ID, ITEM_BYTES, SCALE, Work, mla_decode, sums


def sparse_decode(
    heads: int, lora: int, rope: int, dtype: str, kv_dtype: str, lens: Iterable[int]
) -> Work:
    """SparseMla over so many slots per row."""
    chosen = list(lens)
    attended = mla_decode(heads, lora, rope, dtype, kv_dtype, chosen)
    return attended + Work(reads=4 * sum(chosen))


sparse_prefill = sparse_decode


def index_bytes(d: int, index_dtype: str) -> float:
    """Of one key: FP8 has a scale."""
    return d * ITEM_BYTES[index_dtype] + (SCALE if ITEM_BYTES[index_dtype] == 1 else 0)


def index_prologue(
    heads: int, d: int, rope: int, dtype: str, index_dtype: str, tokens: int
) -> Work:
    """IndexPrologue: a query of `heads` and a key per token, to the cache and back."""
    key, each = index_bytes(d, index_dtype), (heads + 1) * d
    return Work(
        reads=tokens * (each * ITEM_BYTES[dtype] + 4 * rope + ID),
        writes=tokens * (heads * (d * ITEM_BYTES[index_dtype] + SCALE) + key),
        flops=tokens * each * (3.0 + math.log2(d)),
    )


def index_scores(heads: int, d: int, index_dtype: str, lens: Iterable[int]) -> Work:
    """IndexScores, one row per sequence of these lengths."""
    tokens, rows = sums(lens)
    query = heads * (d * ITEM_BYTES[index_dtype] + SCALE)
    return Work(
        reads=tokens * index_bytes(d, index_dtype) + rows * query,
        writes=4 * tokens,
        flops=2.0 * tokens * heads * (d + 1),
    )


def index_topk(k: int, lens: Iterable[int]) -> Work:
    """IndexTopk, one row per sequence of these lengths."""
    tokens, rows = sums(lens)
    return Work(reads=4 * tokens, writes=4 * k * rows)


def index_select(scored: Work, k: int, rows: int) -> Work:
    """IndexSelect: what its scores read and compute, without writing them."""
    return Work(reads=scored.reads, writes=4 * k * rows, flops=scored.flops)
