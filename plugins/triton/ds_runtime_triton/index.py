"""IndexPrologue, IndexScores and IndexTopk over the layout `index_pages`."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ds_runtime.api import Facts
from ds_runtime_triton.config import Sizes, folder, tuned
from ds_runtime_triton.jit.index import index_prologue_kernel, index_scores_kernel
from ds_runtime_triton.jit.topk import count_kernel, finish_kernel, gather_kernel, row_kernel
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.machine import architecture
from ds_runtime_triton.workspace import BINS, CHUNKS, COUNTED, LISTED, PROGRAMS

FP8 = torch.float8_e4m3fn
_HEADS = 16  # query heads of one program
_LEAST = 16  # columns that the matrix unit takes
_LEAST_CHUNK = 2048  # tokens that one of them counts


def _parts(cache: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """(keys, their scales, elements between keys, scales between pages) of one layer; the first
    two as tensors that begin where those of page 0 do."""
    if cache.dtype != torch.uint8:
        return cache, cache, cache.stride(1), 0
    flat = cache.view(-1)
    width = cache.shape[2] - 4
    scales = flat[cache.shape[1] * width :].view(torch.float32)
    return flat.view(FP8), scales, width, cache.stride(0) // 4


def index_prologue(
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
) -> tuple[Tensor, Tensor]:
    """IndexPrologue: one launch; a program per token and block of heads, one more for the key."""
    tokens, heads, dim = q.shape
    fp8 = cache.dtype == torch.uint8
    dtype = FP8 if fp8 else cache.dtype
    q_out = torch.empty(tokens, heads, dim, dtype=dtype, device=q.device)
    scale = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens:
        keys, scales, key_row, scale_page = _parts(cache)
        block = min(_HEADS, pow2(heads))
        index_prologue_kernel[(tokens, cdiv(heads, block) + 1)](
            q, k, norm_weight, norm_bias, positions, cos_sin, keys, scales, slots, q_out, scale,
            heads, cos_sin.shape[1], cache.shape[1], eps, *q.stride()[:2], k.stride(0),
            cache.stride(0), key_row, scale_page, HEADS=block, DIM=dim,
            STAGES=dim.bit_length() - 1, PAIRS=interleaved, FP8=fp8, num_warps=4,
        )  # fmt: skip
    return q_out, scale


def scores_variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of IndexScores, of one sequence or of one row of each."""
    return _scores_sizes(facts.index_dtype).number(rows)


def topk_variant(facts: Facts, rows: int) -> Hashable:
    """Of IndexTopk."""
    return tuned(architecture(), "index_topk").number(rows)


def _scores_sizes(dtype: str) -> Sizes:
    """dtype: of keys and queries."""
    kind = "fp8" if dtype == "float8_e4m3fn" else "float"
    return tuned(folder(architecture(), dtype), "index_scores", kind)


def index_scores(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, owners: Tensor, lens: Tensor
) -> Tensor:
    """IndexScores: one program per chunk of tokens and block of rows."""
    each = cdiv(q.shape[0], max(1, page_table.shape[0]))
    return _scores(q, weights, cache, page_table, owners, lens, each)


def index_scores_ordered(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, owners: Tensor, lens: Tensor
) -> Tensor:
    """As index_scores, by one configuration: that of a row to a sequence."""
    return _scores(q, weights, cache, page_table, owners, lens, 1)


def _scores(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    owners: Tensor,
    lens: Tensor,
    each: int,
) -> Tensor:
    """each: rows of a sequence."""
    (rows, heads, dim), page = q.shape, cache.shape[1]
    width = page_table.shape[1] * page
    out = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    if rows:
        fp8 = cache.dtype == torch.uint8
        keys, scales, key_row, scale_page = _parts(cache)
        config = dict(_scores_sizes(str(q.dtype).removeprefix("torch.")).at(each))
        block = config["ROWS"]
        index_scores_kernel[(cdiv(width, config["CHUNK"]), cdiv(rows, block))](
            q, weights, keys, scales, page_table, owners, lens, out, rows, heads,
            *q.stride()[:2], weights.stride(0), cache.stride(0), key_row, scale_page,
            page_table.stride(0), out.stride(0), PAGE=page, DIM=dim, HEADS=pow2(heads, _LEAST),
            FP8=fp8, **config,
        )  # fmt: skip
    return out


def _chunk(rows: int, width: int, programs: int) -> int:
    """Tokens of a row that one program counts: a power of two. Shapes alone decide."""
    pieces = max(1, min(CHUNKS, min(programs, PROGRAMS) // rows))
    return max(_LEAST_CHUNK, pow2(cdiv(width, pieces)))


def index_topk(
    scores: Tensor, lens: Tensor, owners: Tensor, page_table: Tensor, page_size: int, k: int
) -> Tensor:
    """IndexTopk, in one launch for rows of few tokens. If the table has room for more, there are
    two that count, one that collects, and one that chooses among what the counts leave open."""
    rows, width = scores.shape
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    config = dict(tuned(architecture(), "index_topk").at(rows))
    chunk = _chunk(rows, width, config.pop("PROGRAMS"))
    row_warps = config.pop("ROW_WARPS")
    alone = config["ALONE"]
    pages = owners, page_table, out, page_table.stride(0)
    sizes = pow2(k), page_size, alone
    totals = torch.empty(COUNTED, rows, BINS, dtype=torch.int32, device=scores.device)
    whole = scores, lens, totals, rows, k, scores.stride(0)
    row_kernel[(rows,)](*whole, *pages, *sizes, num_warps=row_warps)
    if width > alone:
        chunks = cdiv(width, chunk)
        counts = torch.empty(COUNTED, rows, chunks, BINS, dtype=torch.int32, device=scores.device)
        listed = torch.empty(rows, LISTED, dtype=torch.int32, device=scores.device)
        given = scores, lens, counts, totals, rows, chunks, chunk, k, scores.stride(0)
        for digit in range(COUNTED):
            count_kernel[(chunks, rows)](*given, DIGIT=digit, **config)
        gather_kernel[(chunks, rows)](
            *given, listed, *pages, *sizes[:-1], LISTED=LISTED, CHUNKS=CHUNKS, **config
        )
        finish_kernel[(rows,)](*whole, listed, *pages, *sizes[1:], LISTED, num_warps=row_warps)
    return out
