"""Low-rank adapters: down to the rank, then up and added, each row by its own slot."""

from __future__ import annotations

import triton.language as tl

from ds_runtime_triton.jit.entry import entry, follow


@entry
def lora_down_kernel(
    x,
    a,
    adapters,
    inner,
    n,
    rank,
    groups,
    stride_x,
    stride_xg,
    stride_ag,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """inner[row, group] = x · Aᵀ in fp32, of one row, one group and RANK ranks."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    slot = tl.load(adapters + row).to(tl.int64)
    ranks = tl.program_id(2) * RANK + tl.arange(0, RANK)
    if slot >= 0:
        k = tl.arange(0, BLOCK)
        x_row = x + row * stride_x + group * stride_xg + k
        a_rows = a + group * stride_ag + (slot * rank + ranks[:, None]) * n + k[None, :]
        acc = tl.zeros((RANK, BLOCK), tl.float32)
        for start in range(0, n, BLOCK):
            inside = start + k < n
            values = tl.load(x_row + start, mask=inside, other=0.0).to(tl.float32)
            mask = (ranks < rank)[:, None] & inside[None, :]
            weights = tl.load(a_rows + start, mask=mask, other=0.0).to(tl.float32)
            acc += values[None, :] * weights
        tl.store(inner + (row * groups + group) * rank + ranks, tl.sum(acc, 1), mask=ranks < rank)


@entry
def lora_up_kernel(
    inner,
    b,
    adapters,
    y,
    n,
    rank,
    groups,
    stride_y,
    stride_yg,
    stride_bg,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[row, group] += inner · B, one block of columns. `groups`: of inner, 1 or as many as y's."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    slot = tl.load(adapters + row).to(tl.int64)
    cols = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if slot >= 0:
        ranks = tl.arange(0, RANK)
        owner = row * groups + tl.where(groups > 1, group, 0)
        b_rows = b + group * stride_bg + slot * rank * n + cols[None, :]
        acc = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, rank, RANK):
            held = start + ranks < rank
            values = tl.load(inner + owner * rank + start + ranks, mask=held, other=0.0)
            mask = held[:, None] & (cols < n)[None, :]
            weights = tl.load(b_rows + (start + ranks)[:, None] * n, mask=mask, other=0.0)
            acc += tl.sum(values[:, None] * weights.to(tl.float32), 0)
        place = y + row * stride_y + group * stride_yg + cols
        old = tl.load(place, mask=cols < n, other=0.0).to(tl.float32)
        tl.store(place, (old + acc).to(y.dtype.element_ty), mask=cols < n)
