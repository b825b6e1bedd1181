"""Contracts of sparse attention: the lightning indexer scores every cached token, MLA attends few.

Per layer: index_prologue makes index queries and caches index keys, index_select keeps the best of
the tokens that a row sees as cache slots (index_scores rates them, index_topk chooses),
sparse_prefill and sparse_decode attend these. Layers may reuse the slots of an earlier one. Source:
DeepSeek-V3.2 technical report; the rotation of the indexer is half-split (its first release had it
interleaved, by mistake).

The index cache is paged like the latent cache and shares its pages' numbers. Slot s is row
s % page_size of page s // page_size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    from torch import Tensor

_REF = "ds_runtime.ops.reference"
_EXACT = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}


class IndexPrologue(Protocol):
    """Norm of the index key, rotation of both, Hadamard, encoding, cache write.

    q: [T, heads, d], k: [T, d] in the compute dtype, last dims contiguous, outer dims may be
    strided; heads may be 0, where only keys are wanted. d is a power of two. k becomes
    LayerNorm(k) · norm_weight + norm_bias (both [d] float32; biased variance plus eps). Of both,
    the first r dims are rotated by position, cos_sin [positions, r] float32 being as in Rope: as
    pairs (x0,x1)… if `interleaved`, as halves (xᵢ, x[i + r/2]) otherwise. Then both are multiplied
    by the Hadamard matrix of size d (Sylvester's order) · d^-½. All of it in fp32.
    cache: one layer in the bound index layout, in facts.index_dtype. float8_e4m3fn: scale =
    max(amax, 1e-4) / 448 rounded up to a power of two, per key and per query head; otherwise the
    scale is 1. Writes the keys at `slots` ([T] int64, distinct, negative ones are skipped) and
    nothing else. Returns (queries [T, heads, d] in facts.index_dtype, scale [T, heads] float32):
    the query is their product. T == 0 is legal.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
        cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class IndexScores(Protocol):
    """score(row, s) = key_scale(s) · Σ_h relu(q_h · k_s) · weight_h, of the tokens a row sees.

    q: [rows, heads, d] as IndexPrologue returns it. weights: [rows, heads] float32, of any sign,
    all constant factors and the queries' scales included. page_table: [sequences, pages] int32.
    owners: [rows] int32, the sequence of each row, not falling. lens: [rows] int32, how many
    tokens of it the row sees (≥ 1). Returns [rows, pages · page_size] float32, accumulated in
    fp32; column s of a row is its sequence's token s, columns from lens[row] on are undefined.
    Pages that hold no token that is seen may hold NaN. 0 rows is legal.
    """

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        page_table: Tensor,
        owners: Tensor,
        lens: Tensor,
    ) -> Tensor: ...


class IndexTopk(Protocol):
    """The slots of the `k` best tokens that each row sees, of equal ones those that come first.

    scores: [rows, width] float32, width ≤ pages · page_size, undefined from lens[row] on. owners,
    lens, page_table as in IndexScores. Returns [rows, k] int32 slots, each once, in any order; a
    row that sees fewer than k tokens has all of them first and −1 in the rest. 0 rows is legal.
    """

    def __call__(
        self,
        scores: Tensor,
        lens: Tensor,
        owners: Tensor,
        page_table: Tensor,
        page_size: int,
        k: int,
    ) -> Tensor: ...


class IndexSelect(Protocol):
    """index_scores and index_topk in one, so that nobody keeps scores. A fusion.

    q, weights, cache, page_table, owners, lens as in IndexScores. Returns [rows, k] int32 slots as
    IndexTopk does; among tokens whose scores differ by no more than their rounding, any.
    """

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        page_table: Tensor,
        owners: Tensor,
        lens: Tensor,
        k: int,
    ) -> Tensor: ...


SCORES = 1 << 25  # rows are scored in groups so that their scores stay below this many: 128 MiB


def scored_rows(width: int) -> int:
    """Rows that are scored together, where each has scores of `width` tokens."""
    return max(1, SCORES // width)


def compose_index_select(
    ops: Any,
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    owners: Tensor,
    lens: Tensor,
    k: int,
) -> Tensor:
    """INDEX_SELECT over the platform's own index_scores and index_topk."""
    page = cache.shape[1]
    step, chosen = scored_rows(page_table.shape[1] * page), []
    if q.shape[0] <= step:
        scores = ops.index_scores(q, weights, cache, page_table, owners, lens)
        return ops.index_topk(scores, lens, owners, page_table, page, k)  # type: ignore[no-any-return]
    for first in range(0, q.shape[0], step):
        some = slice(first, first + step)
        mine, seen = owners[some], lens[some]
        scores = ops.index_scores(q[some], weights[some], cache, page_table, mine, seen)
        chosen.append(ops.index_topk(scores, seen, mine, page_table, page, k))
    every: Tensor = chosen[0].new_empty(q.shape[0], k)
    for i, part in enumerate(chosen):
        every[i * step : i * step + step] = part
    return every


class SparseMla(Protocol):
    """Absorbed MLA over chosen slots of the paged latent cache.

    q: [rows, heads, kv_lora + rope] (absorbed latent part, then rotated rope part). cache: one
    layer in the bound KV layout. slots: [rows, n] int32, any n ≥ 1, each row's slots distinct;
    negative ones are no token and may stand anywhere. kv_lora: width of the latent. Softmax in
    fp32 of q·k·scale over a row's slots. Returns [rows, heads, kv_lora] in q.dtype; a row without
    slots gives 0. Slots that are not named may hold NaN. 0 rows is legal.
    """

    def __call__(
        self, q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
    ) -> Tensor: ...


INDEX_PROLOGUE = Op(
    name="index_prologue",
    protocol=f"{__name__}:IndexPrologue",
    reference=f"{_REF}.attention.index:index_prologue",
    samples=f"{_REF}.attention.index:index_prologue_samples",
    tolerance={"float32": 1e-5, "bfloat16": 8e-3, "float16": 2e-3},
    layout="index",
    summary="index query and key: norm, rotation, Hadamard, encoding and cache write",
)

INDEX_SCORES = Op(
    name="index_scores",
    protocol=f"{__name__}:IndexScores",
    reference=f"{_REF}.attention.index:index_scores",
    samples=f"{_REF}.attention.index:index_scores_samples",
    tolerance={"float32": 2e-5, "bfloat16": 2e-3, "float16": 2e-3},
    heavy=True,
    layout="index",
    summary="rate every cached token for every row",
)

INDEX_TOPK = Op(
    name="index_topk",
    protocol=f"{__name__}:IndexTopk",
    reference=f"{_REF}.attention.index:index_topk",
    samples=f"{_REF}.attention.index:index_topk_samples",
    tolerance=_EXACT,
    summary="slots of the best tokens of each row",
)

INDEX_SELECT = Op(
    name="index_select",
    protocol=f"{__name__}:IndexSelect",
    reference=f"{_REF}.attention.index:index_select",
    samples=f"{_REF}.attention.index:index_select_samples",
    tolerance={"float32": 2e-5, "bfloat16": 4e-3, "float16": 4e-3},
    composition=f"{__name__}:compose_index_select",
    uses=("index_scores", "index_topk"),
    layout="index",
    summary="score every cached token and keep the best, fused",
)

_SPARSE: dict[str, Any] = {
    "reference": f"{_REF}.attention.sparse:sparse_mla",
    "samples": f"{_REF}.attention.sparse:sparse_mla_samples",
    "tolerance": {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 3e-3},
}

SPARSE_PREFILL = Op(
    name="sparse_prefill",
    protocol=f"{__name__}:SparseMla",
    heavy=True,
    layout="kv",
    summary="absorbed attention over chosen tokens, for prefill rows",
    **_SPARSE,
)

SPARSE_DECODE = Op(
    name="sparse_decode",
    protocol=f"{__name__}:SparseMla",
    heavy=True,
    layout="kv",
    summary="absorbed attention over chosen tokens, for decode rows",
    **_SPARSE,
)
