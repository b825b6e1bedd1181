"""Torch references of the lightning indexer, and the layout `index_pages`.

One layer is one tensor. In a float dtype it is [pages, page_size, d]. In float8_e4m3fn it is uint8
[pages, page_size, d + 4], where each page holds page_size · d bytes of keys and then page_size
float32 scales. In float4_e2m1fn_x2 it is int8 [pages, page_size, d / 2 + d / 32]. Each key has e2m1
codes, two in a byte, the first in the low bits, then exponent bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.contract import FP4_KEYS, Facts
from ds_runtime.ops.dtypes import E2M1, decode_scale, fp8_vectors, is_fp8, torch_dtype, wide
from ds_runtime.ops.reference.attention.cache import gather_rows
from ds_runtime.ops.reference.attention.rope import rotated
from ds_runtime.ops.reference.attention.window import turned
from ds_runtime.ops.reference.matrices.rounding import to_e2m1

FP8 = torch.float8_e4m3fn
_ELEMENTS = 1 << 24  # rows are taken in groups so that products stay below this many


def allocate_index_pages(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """One layer's index cache, zeroed."""
    dtype, d = torch_dtype(facts.index_dtype), facts.dims["index_dim"]
    if facts.index_dtype == FP4_KEYS:
        width = d // 2 + d // 32
        return torch.zeros(num_pages, facts.page_size, width, dtype=torch.int8, device=device)
    if is_fp8(dtype):
        return torch.zeros(num_pages, facts.page_size, d + 4, dtype=torch.uint8, device=device)
    return torch.zeros(num_pages, facts.page_size, d, dtype=dtype, device=device)


def fp8_parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an FP8 index cache: keys [pages, page_size, d] as bytes, scales [pages, page_size]
    float32."""
    pages, size, width = cache.shape
    flat = cache.view(pages, size * width)
    keys = flat.as_strided((pages, size, width - 4), (size * width, width - 4, 1))
    return keys, flat[:, size * (width - 4) :].view(torch.float32)


def read_keys(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` keys of the sequence with these pages: [length, d], wide, new."""
    if cache.dtype == torch.int8:
        return read_fp4(gather_rows(cache, pages, 0, length))
    if cache.dtype != torch.uint8:
        keys = gather_rows(cache, pages, 0, length)
        return keys.to(wide(keys.dtype))
    values, scales = fp8_parts(cache)
    size = cache.shape[1]
    tokens = torch.arange(length, device=cache.device)
    owners, rows = pages[tokens // size].to(torch.int64), tokens % size
    return values[owners, rows].view(FP8).to(torch.float32) * scales[owners, rows].unsqueeze(-1)


def fp4_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] as e2m1 codes [..., d] uint8, and exponent bytes [..., d / 32] uint8."""
    groups = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    scale = (groups.abs().amax(-1) / E2M1[-1]).clamp(min=2.0**-126)
    mantissa, exponent = torch.frexp(scale)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    by = torch.ldexp(torch.ones_like(scale), exponent).unsqueeze(-1)
    return to_e2m1(groups / by).flatten(-2), (exponent + 127).to(torch.uint8)


def fp4_values(codes: Tensor, exponents: Tensor) -> Tensor:
    """What `fp4_groups` gives stands for, in float32."""
    table = torch.tensor((*E2M1, *(-v for v in E2M1)), device=codes.device)
    scales = decode_scale(exponents, torch.float32).repeat_interleave(32, -1)
    return table[codes.to(torch.int64)] * scales


def pack_fp4(keys: Tensor) -> Tensor:
    """Keys [n, d] as rows [n, d / 2 + d / 32] int8 of a cache."""
    codes, exponents = fp4_groups(keys)
    return torch.cat((codes[..., ::2] | codes[..., 1::2] << 4, exponents), -1).view(torch.int8)


def read_fp4(packed: Tensor) -> Tensor:
    """What such rows stand for: [n, d] float32."""
    rows = packed.view(torch.uint8)
    half = rows.shape[-1] * 16 // 17
    pairs = rows[..., :half]
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return fp4_values(codes, rows[..., half:])


def hadamard(x: Tensor) -> Tensor:
    """Sylvester's Hadamard matrix of the last dim's size, times its ^-½."""
    d = x.shape[-1]
    width = 1
    while width < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * width), 2, width)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).reshape(x.shape)
        width *= 2
    return torch.mul(x, d**-0.5)


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
    """Reference of IndexPrologue for index_pages."""
    compute = wide(cache.dtype)
    cos, sin = cos_sin[positions].to(compute).chunk(2, dim=-1)
    norm = (k.shape[-1],), norm_weight.to(compute), norm_bias.to(compute), eps
    keys = torch.nn.functional.layer_norm(k.to(compute), *norm)
    keys = hadamard(rotated(keys, cos, sin, interleaved))
    queries = rotated(q.to(compute), cos.unsqueeze(1), sin.unsqueeze(1), interleaved)
    return _encoded(hadamard(queries), keys, cache, slots)


def index_encode(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    mixed: bool,
    cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Reference of IndexEncode for index_pages."""
    compute = wide(cache.dtype)
    queries, keys = turned(q.to(compute), positions, cos_sin), k.to(compute)
    if mixed:
        queries, keys = hadamard(queries), hadamard(keys)
    made, scale = _encoded(queries, keys, cache, slots)
    return (made.to(q.dtype) if cache.dtype == torch.int8 else made), scale


def _encoded(queries: Tensor, keys: Tensor, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys go to their slots; queries as the cache's dtype has them, and their scales."""
    real = slots >= 0
    page, row = slots[real] // cache.shape[1], slots[real] % cache.shape[1]
    if cache.dtype == torch.int8:
        cache[page, row] = pack_fp4(keys[real])
        return fp4_values(*fp4_groups(queries)), queries.new_ones(queries.shape[:2])
    if cache.dtype != torch.uint8:
        cache[page, row] = keys[real].to(cache.dtype)
        return queries.to(cache.dtype), queries.new_ones(queries.shape[:2], dtype=torch.float32)
    values, scales = fp8_parts(cache)
    rounded, scale = fp8_vectors(keys[real])
    values[page, row], scales[page, row] = rounded.view(torch.uint8), scale
    return fp8_vectors(queries)


def index_scores(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, owners: Tensor, lens: Tensor
) -> Tensor:
    """Reference of IndexScores for index_pages: one sequence after the other."""
    rows, heads, _ = q.shape
    compute = wide(cache.dtype)
    width = page_table.shape[1] * cache.shape[1]
    scores = torch.full((rows, width), float("-inf"), dtype=compute, device=q.device)
    counts = torch.bincount(owners.to(torch.int64), minlength=page_table.shape[0]).tolist()
    first = 0
    for pages, count in zip(page_table, counts, strict=True):
        if not count:
            continue
        seen = int(lens[first : first + count].max())
        keys = read_keys(cache, pages, seen).to(compute)
        step = max(1, _ELEMENTS // max(1, heads * seen))
        for start in range(first, first + count, step):
            some = slice(start, min(start + step, first + count))
            dots = torch.relu(q[some].to(compute) @ keys.T)  # [rows, heads, seen]
            scores[some, :seen] = torch.einsum("rht,rh->rt", dots, weights[some].to(compute))
        first += count
    beyond = torch.arange(width, device=q.device) >= lens.unsqueeze(1)
    return scores.masked_fill(beyond, float("-inf"))


def slots_of(tokens: Tensor, page_table: Tensor, owners: Tensor, page_size: int) -> Tensor:
    """Cache slots [rows, n] int32 of tokens [rows, n] of each row's sequence."""
    pages = page_table[owners.to(torch.int64)]
    at = (tokens // page_size).clamp(max=page_table.shape[1] - 1)
    return (pages.gather(1, at) * page_size + tokens % page_size).to(torch.int32)


def index_topk(
    scores: Tensor, lens: Tensor, owners: Tensor, page_table: Tensor, page_size: int, k: int
) -> Tensor:
    """Reference of IndexTopk."""
    rows, width = scores.shape
    columns = torch.arange(width, device=scores.device)
    seen = scores.masked_fill(columns >= lens.unsqueeze(1), float("-inf"))
    order = seen.sort(dim=1, descending=True, stable=True).indices[:, :k]
    slots = slots_of(order, page_table, owners, page_size)
    slots = slots.masked_fill(columns[: order.shape[1]] >= lens.unsqueeze(1), -1)
    return torch.cat((slots, slots.new_full((rows, k - order.shape[1]), -1)), dim=1)


def topk(
    scores: Tensor, lens: Tensor, owners: Tensor, page_table: Tensor, page_size: int, k: int
) -> Tensor:
    """IndexTopk by torch.topk: of whole numbers that rise with the score and fall with the place,
    as torch says nothing of equal ones."""
    rows, width = scores.shape
    columns = torch.arange(width, device=scores.device)
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32)  # of −0.0, those of 0.0
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys = ((rising << 32) - columns).masked_fill(
        columns >= lens.unsqueeze(1), torch.iinfo(torch.int64).min
    )
    order = keys.topk(min(k, width), dim=1).indices
    slots = slots_of(order, page_table, owners, page_size)
    slots = slots.masked_fill(columns[: order.shape[1]] >= lens.unsqueeze(1), -1)
    return torch.cat((slots, slots.new_full((rows, k - order.shape[1]), -1)), dim=1)


def index_select(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    owners: Tensor,
    lens: Tensor,
    k: int,
) -> Tensor:
    """Reference of IndexSelect."""
    scores = index_scores(q, weights, cache, page_table, owners, lens)
    return index_topk(scores, lens, owners, page_table, cache.shape[1], k)
