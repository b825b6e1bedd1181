"""Native sparse attention: the lightning indexer's ops, and MLA over the slots that it chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime_cpu.native import active
from ds_runtime_cpu.small import CACHE, CODE, KEYS, in_rows

_ROWS = 64  # whose ranges of keys are in memory at a time
_STARTS = torch.arange(_ROWS + 1, dtype=torch.int32)  # every row a sequence
_BYTES = {torch.uint8: torch.float8_e4m3fn}  # an FP8 index cache is bytes: keys, then scales


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
    """IndexPrologue for index_pages in the compute dtype or in float8_e4m3fn."""
    rows, heads, d = q.shape
    dtype = _BYTES.get(cache.dtype, cache.dtype)
    queries = torch.empty(rows, heads, d, dtype=dtype)
    scale = torch.empty(rows, heads, dtype=torch.float32)
    by_row, by_head, _ = q.stride()
    active.index_prologue(
        CODE[q.dtype],
        CODE[dtype],
        q.data_ptr(),
        by_row,
        by_head,
        heads,
        k.data_ptr(),
        k.stride()[0],
        d,
        norm_weight.data_ptr(),
        norm_bias.data_ptr(),
        eps,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        interleaved,
        cache.data_ptr(),
        cache.shape[1],
        slots.data_ptr(),
        queries.data_ptr(),
        scale.data_ptr(),
        rows,
    )
    return queries, scale


def index_encode(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    mixed: bool,
    cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """IndexEncode for index_pages in the compute dtype, float8_e4m3fn and float4_e2m1fn_x2."""
    rows, heads, d = q.shape
    q, k, positions, slots = in_rows(q), in_rows(k), positions.contiguous(), slots.contiguous()
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32 and cache.is_contiguous()
    packed = cache.dtype == torch.int8
    dtype = q.dtype if packed else _BYTES.get(cache.dtype, cache.dtype)
    queries = torch.empty(rows, heads, d, dtype=dtype)
    scale = torch.empty(rows, heads, dtype=torch.float32)
    by_row, by_head, _ = q.stride()
    active.index_encode(
        CODE[q.dtype],
        KEYS[cache.dtype],
        q.data_ptr(),
        by_row,
        by_head,
        heads,
        k.data_ptr(),
        k.stride()[0],
        d,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        mixed,
        cache.data_ptr(),
        cache.shape[1],
        slots.data_ptr(),
        queries.data_ptr(),
        scale.data_ptr(),
        rows,
    )
    return queries, scale


def index_scores(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, owners: Tensor, lens: Tensor
) -> Tensor:
    """IndexScores for index_pages in float32, bfloat16, float8_e4m3fn and float4_e2m1fn_x2."""
    rows, heads, d = q.shape
    page_size, width = cache.shape[1], page_table.shape[1] * cache.shape[1]
    q, owners, lens = q.contiguous(), owners.contiguous(), lens.contiguous()
    codes, seen = (CODE[q.dtype], KEYS[cache.dtype]), (owners.data_ptr(), lens.data_ptr())
    out = torch.empty(rows, width, dtype=torch.float32)
    assert weights.stride()[1] == 1 and page_table.stride()[1] == 1 and cache.is_contiguous()
    active.index_scores(
        *codes,
        q.data_ptr(),
        heads,
        d,
        weights.data_ptr(),
        weights.stride()[0],
        cache.data_ptr(),
        page_size,
        page_table.data_ptr(),
        page_table.stride()[0],
        *seen,
        out.data_ptr(),
        width,
        rows,
    )
    return out


def index_topk(
    scores: Tensor, lens: Tensor, owners: Tensor, page_table: Tensor, page_size: int, k: int
) -> Tensor:
    """IndexTopk; slots by rising token."""
    rows = scores.shape[0]
    slots = torch.empty(rows, k, dtype=torch.int32)
    owners, lens = owners.contiguous(), lens.contiguous()
    active.index_topk(
        scores.data_ptr(),
        scores.stride()[0],
        lens.data_ptr(),
        owners.data_ptr(),
        page_table.data_ptr(),
        page_table.stride()[0],
        page_size,
        k,
        slots.data_ptr(),
        rows,
    )
    return slots


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla for latent_pages in the compute dtype or in float8_e4m3fn, and for
    latent_fp8_groups. It is decode over a page table of the chosen slots: every row is a sequence
    and every page one token."""
    rows, heads, width = q.shape
    n = slots.shape[1]
    out = torch.empty(rows, heads, kv_lora, dtype=q.dtype)
    pages = torch.empty(rows, n, dtype=torch.int32)
    lens = torch.empty(rows, dtype=torch.int32)
    assert q.stride()[2] == 1 and slots.stride()[1] == 1 and cache.is_contiguous()
    active.compact_slots(
        slots.data_ptr(), slots.stride()[0], n, pages.data_ptr(), lens.data_ptr(), rows
    )
    codes = (CODE[q.dtype], CACHE[cache.dtype])
    for first in range(0, rows, _ROWS):
        count = min(_ROWS, rows - first)
        where = (lens.data_ptr() + 4 * first, _STARTS.data_ptr())
        active.mla_decode(
            *codes,
            q.data_ptr() + first * q.stride()[0] * q.element_size(),
            q.stride()[0],
            q.stride()[1],
            cache.data_ptr(),
            1,
            width,
            kv_lora,
            pages.data_ptr() + 4 * first * n,
            n,
            *where,
            scale,
            out.data_ptr() + first * heads * kv_lora * out.element_size(),
            count,
            heads,
            0,
            0,
            0,
        )
    return out


scaled_sparse_mla = sparse_mla  # of the other layout, offered apart
