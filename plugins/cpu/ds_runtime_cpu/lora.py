"""LoraDelta in torch, by the slots that the rows name: they are read on the host, where they are.

One adapter is two matmuls. Several are the same two over all slots, with a mask between, while the
rows are few: calls cost more than arithmetic then. Many rows go adapter by adapter.

torch's matmuls choose by the number of rows. Where rows must have bits of their own, the native
product of router scores serves, which sums each row in one order, in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime_cpu.routing import router_logits

_TILE = 32  # columns of a 16-bit row: torch's matmul may read a shorter one beyond its end
_FEW = 64  # rows


def lora_delta(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """Serves the contract LoraDelta."""
    named = set(adapters.tolist())
    if named <= {-1}:
        return
    if len(named) == 1:
        (slot,) = named
        _add(y, x, a[:, slot], b[:, slot])
    elif len(adapters) <= _FEW:
        lora_delta_masked(y, x, a, b, adapters)
    else:
        for slot in named - {-1}:
            rows = (adapters == slot).nonzero().squeeze(1)
            some = y.index_select(0, rows)
            _add(some, x.index_select(0, rows), a[:, slot], b[:, slot])
            y.index_copy_(0, rows, some)


def lora_delta_masked(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """LoraDelta without a look at the slots, for recordings: over all of them, with a mask."""
    slots, rank = a.shape[1:3]
    own = adapters[:, None] == torch.arange(slots, dtype=adapters.dtype)
    others = ~own[:, :, None].expand(-1, -1, rank).flatten(1)  # [rows, slots · rank]
    _add(y, x, a.flatten(1, 2), b.flatten(1, 2), others)


def _add(y: Tensor, x: Tensor, down: Tensor, up: Tensor, others: Tensor | None = None) -> None:
    """down [groups or 1, ranks, in], up [groups or 1, ranks, out]; `others` [rows, ranks] bool: the
    ranks that are not a row's own.
    """
    if y.shape[1] == x.shape[1] == down.shape[0] == up.shape[0] == 1:
        inner = F.linear(*_whole(x[:, 0], down[0]))
        if others is not None:
            inner.masked_fill_(others, 0)
        short = -inner.shape[1] % _TILE if inner.dtype.itemsize == 2 else 0
        if short:
            y[:, 0].addmm_(F.pad(inner, (0, short)), F.pad(up[0], (0, 0, 0, short)))
        else:
            y[:, 0].addmm_(inner, up[0])
        return
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    inner = torch.matmul(x.to(wide).transpose(0, 1), down.to(wide).transpose(1, 2))
    if others is not None:
        inner.masked_fill_(others, 0)
    y.add_(torch.matmul(inner, up.to(wide)).transpose(0, 1))  # [rows, groups or 1, out]


def lora_delta_ordered(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """LoraDelta, a row's bits by that row alone: adapter by adapter, for the rows of each."""
    for slot in sorted(set(adapters.tolist()) - {-1}):
        rows = (adapters == slot).nonzero().squeeze(1)
        whole = len(rows) == len(adapters)
        some, given = (y, x) if whole else (y.index_select(0, rows), x.index_select(0, rows))
        _add_ordered(some, given, a[:, slot], b[:, slot])
        if not whole:
            y.index_copy_(0, rows, some)


def lora_delta_ordered_masked(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """The same bits without a look at the slots, for recordings: every adapter over all rows."""
    for slot in range(a.shape[1]):
        some = y.clone()
        _add_ordered(some, x, a[:, slot], b[:, slot])
        y.copy_(torch.where((adapters == slot)[:, None, None], some, y))


def _add_ordered(y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> None:
    """As `_add`, each product by group."""
    parts = [
        router_logits(x[:, g % x.shape[1]], down[g % len(down)].float())
        for g in range(max(x.shape[1], len(down)))
    ]
    for g in range(y.shape[1]):
        more = router_logits(parts[g % len(parts)], up[g % len(up)].float().t())
        y[:, g].add_(more)  # in float32, rounded once


def _whole(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both filled up with zeros to whole tiles."""
    short = -x.shape[1] % _TILE if x.dtype.itemsize == 2 else 0
    return (F.pad(x, (0, short)), F.pad(weight, (0, short))) if short else (x, weight)
