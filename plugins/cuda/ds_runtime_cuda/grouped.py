"""Tokens sorted by expert for grouped matmuls, without a look at the device's numbers.

Every expert's rows begin at a multiple of `align`; how many rows there are at most follows from
shapes alone, and rows that nobody owns are marked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ds_runtime_cuda.quant import GROUP, groups_of, scale_columns


class Rows(NamedTuple):
    """`of` [tokens, top_k] int64: the row of each pair, −1 of those whose expert another rank has.
    `owner` [rows] int32: its expert, or −1.

    `ends` [experts] int32: after each expert's last row, padding included.
    """

    of: Tensor
    owner: Tensor
    ends: Tensor


Arrange: TypeAlias = Callable[[Rows], tuple[Tensor, Tensor]]
"""Codes at their rows, as `scatter` gives them."""


def sort_rows(ids: Tensor, experts: int, align: int) -> Rows:
    """A row for every pair of token and expert. ids: [tokens, top_k] int32, distinct per token, −1
    where there is no pair."""
    pairs = ids.numel()
    most = most_rows(pairs, experts, align)
    if ids.is_cuda and pairs:
        from ds_runtime_cuda.jit import place_pairs

        of = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
        owners, behind = (
            torch.empty(count, dtype=torch.int32, device=ids.device) for count in (most, experts)
        )
        place_pairs(ids.contiguous(), align, of, owners, behind)
        return Rows(of, owners, behind)
    flat = ids.reshape(-1).to(torch.int64)
    chosen, order = torch.sort(flat, stable=True)
    every = torch.arange(experts + 1, device=ids.device)
    bounds = torch.searchsorted(chosen, every)  # [experts + 1]: pairs before each expert
    counts = bounds.diff()
    ends = ((counts + align - 1) // align * align).cumsum(0)
    begins = ends - (counts + align - 1) // align * align
    rank = torch.arange(pairs, device=ids.device) - bounds[chosen]
    placed = torch.where(chosen >= 0, begins[chosen] + rank, -1)
    rows = torch.empty_like(flat).scatter_(0, order, placed)
    owner = torch.searchsorted(ends, torch.arange(most, device=ids.device), right=True)
    owner = torch.where(owner < experts, owner, -1).to(torch.int32)
    return Rows(rows.view(ids.shape), owner, ends.to(torch.int32))


def most_rows(pairs: int, experts: int, align: int) -> int:
    """Rows that `pairs` can take at most: each expert with any wastes less than `align`."""
    if align == 1:
        return pairs
    return (min(pairs, experts) + pairs // align) * align


def scatter(x: Tensor, rows: Rows, powers: bool = False) -> tuple[Tensor, Tensor]:
    """x [tokens, n] quantised to its rows: (e4m3 [rows, n], scales as quant.quantise)."""
    count, n = rows.owner.shape[0], x.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    q = torch.empty(count, n, dtype=torch.float8_e4m3fn, device=x.device)
    scale = scale_columns(count, n // GROUP, x.device)
    if x.is_cuda:
        from ds_runtime_cuda.jit import quantise_to

        quantise_to(x, rows.of, q, scale, powers)
    else:
        values, sizes = groups_of(x, powers)
        codes = values.reshape(x.shape).view(torch.uint8)
        for to in rows.of.T:
            here = to >= 0
            q.view(torch.uint8)[to[here]], scale[to[here]] = codes[here], sizes[here]
    return q, scale


def scatter_codes(q: Tensor, scale: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """As `scatter`, of rows that are codes already: q [tokens, n], scale [tokens, n / 128]."""
    count, n = rows.owner.shape[0], q.shape[1]
    to = torch.empty(count, n, dtype=torch.uint8, device=q.device)
    to_scale = scale_columns(count, n // GROUP, q.device)
    codes = q.view(torch.uint8)
    if q.is_cuda:
        from ds_runtime_cuda.jit import codes_to

        codes_to(codes, scale, rows.of, to, to_scale)
    else:
        for place in rows.of.T:
            here = place >= 0
            to[place[here]], to_scale[place[here]] = codes[here], scale[here]
    return to.view(torch.float8_e4m3fn), to_scale


def silu(gate_up: Tensor, rows: Rows, powers: bool = False) -> tuple[Tensor, Tensor]:
    """silu(gate) · up of owned rows, quantised: [rows, 2n] → (e4m3 [rows, n], scales)."""
    count, n = gate_up.shape[0], gate_up.shape[1] // 2
    q = torch.empty(count, n, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = scale_columns(count, n // GROUP, gate_up.device)
    if gate_up.is_cuda:
        from ds_runtime_cuda.jit import silu_quantise

        silu_quantise(gate_up, rows.owner, q, scale, powers)
    else:
        own = rows.owner >= 0
        gate, up = gate_up[own].to(torch.float32).chunk(2, -1)
        product = (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
        values, sizes = groups_of(product, powers)
        q.view(torch.uint8)[own] = values.reshape(-1, n).view(torch.uint8)
        scale[own] = sizes
    return q, scale


def combine(y: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """Σ_k weights[t, k] · y[row of (t, k)], summed in fp32: [tokens, n] in y.dtype."""
    out = torch.empty(rows.of.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    if y.is_cuda:
        from ds_runtime_cuda.jit import combine_rows

        combine_rows(y, weights.contiguous(), rows.of, out)
    else:
        picked = y[rows.of].to(torch.float32) * weights.unsqueeze(-1)  # [tokens, top_k, n]
        out.copy_(picked.masked_fill_(rows.of.unsqueeze(-1) < 0, 0).sum(1))
    return out
