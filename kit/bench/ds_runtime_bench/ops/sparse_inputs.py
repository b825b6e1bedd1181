"""Inputs of sparse attention's ops for `bench ops`: every row sees `context` tokens of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import fp8_vectors, torch_dtype
from ds_runtime_bench.ops import sparse_work, work
from ds_runtime_bench.ops.place import Place

Inputs = tuple[tuple[Any, ...], work.Work]


def _rows(p: Place, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(page table, owners, lens): a sequence per row, over shuffled pages."""
    each = -(-p.context // p.facts.page_size)
    table = torch.randperm(tokens * each).view(tokens, each).to(torch.int32).to(p.device)
    owners = torch.arange(tokens, dtype=torch.int32, device=p.device)
    return table, owners, torch.full_like(owners, p.context)


def _index_prologue(p: Place, tokens: int) -> Inputs:
    dims, float32 = p.facts.dims, torch.float32
    heads, d, rope = (dims[k] for k in ("index_heads", "index_dim", "qk_rope"))
    args = (
        p.normal(tokens, heads, d),
        p.normal(tokens, d),
        p.normal(d, dtype=float32),
        p.normal(d, dtype=float32),
        1e-6,
        p.positions(tokens),
        p.cos_sin(tokens),
        False,
        p.cache(-(-tokens // p.facts.page_size)),
        p.positions(tokens),
    )
    todo = sparse_work.index_prologue(heads, d, rope, p.facts.dtype, p.facts.index_dtype, tokens)
    return args, todo


def _index_scores(p: Place, tokens: int) -> Inputs:
    heads, d = p.facts.dims["index_heads"], p.facts.dims["index_dim"]
    table, owners, lens = _rows(p, tokens)
    dtype = torch_dtype(p.facts.index_dtype)
    q = p.normal(tokens, heads, d, dtype=torch.float32)
    q = fp8_vectors(q)[0] if dtype == torch.float8_e4m3fn else q.to(dtype)
    weights = p.normal(tokens, heads, dtype=torch.float32)
    todo = sparse_work.index_scores(heads, d, p.facts.index_dtype, (p.context,) * tokens)
    return (q, weights, p.cache(table.numel()), table, owners, lens), todo


def _index_topk(p: Place, tokens: int) -> Inputs:
    table, owners, lens = _rows(p, tokens)
    size, k = p.facts.page_size, p.facts.dims["index_topk"]
    scores = p.normal(tokens, table.shape[1] * size, dtype=torch.float32)
    args = (scores, lens, owners, table, size, k)
    return args, sparse_work.index_topk(k, (p.context,) * tokens)


def _index_select(p: Place, tokens: int) -> Inputs:
    args, scored = _index_scores(p, tokens)
    k = p.facts.dims["index_topk"]
    return (*args, k), sparse_work.index_select(scored, k, tokens)


def _sparse(p: Place, tokens: int) -> Inputs:
    dims, size = p.facts.dims, p.facts.page_size
    heads, lora, rope = (dims[k] for k in ("heads", "kv_lora", "qk_rope"))
    table, _, _ = _rows(p, tokens)
    count = min(dims["index_topk"], p.context)
    chosen = torch.stack([torch.randperm(p.context)[:count] for _ in range(tokens)])
    chosen = chosen.to(p.device)
    slots = table.gather(1, chosen // size) * size + chosen % size
    q = p.normal(tokens, heads, lora + rope)
    args = (q, p.cache(table.numel()), slots.to(torch.int32), lora, (lora + rope) ** -0.5)
    lens = (count,) * tokens
    return args, sparse_work.sparse_decode(heads, lora, rope, p.facts.dtype, p.facts.kv_dtype, lens)


INPUTS: Mapping[str, Callable[[Place, int], Inputs]] = {
    "index_prologue": _index_prologue,
    "index_scores": _index_scores,
    "index_topk": _index_topk,
    "index_select": _index_select,
    "sparse_prefill": _sparse,
    "sparse_decode": _sparse,
}
