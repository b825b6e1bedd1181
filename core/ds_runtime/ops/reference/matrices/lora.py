"""Torch reference of low-rank adapters: two products over all slots at once, one mask between."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import wide
from ds_runtime.ops.reference.cases import Case, Maker, case


def lora_delta(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """Reference of LoraDelta. Reads nothing on the host, so it may be captured."""
    compute = wide(x.dtype)
    slots, rank = a.shape[1:3]
    down = a.to(compute).flatten(1, 2).transpose(1, 2)  # [groups or 1, in, slots · rank]
    up = b.to(compute).flatten(1, 2)  # [groups or 1, slots · rank, out]
    inner = torch.matmul(x.to(compute).transpose(0, 1), down)  # [groups or 1, rows, slots · rank]
    own = adapters[:, None] == torch.arange(slots, device=x.device)
    inner = torch.where(own.repeat_interleave(rank, 1), inner, inner.new_zeros(()))
    delta = torch.matmul(inner, up).transpose(0, 1)  # [rows, groups or 1, out]
    y.copy_(torch.where((adapters >= 0)[:, None, None], y.to(compute) + delta, y))


def lora_delta_samples(facts: Facts) -> Iterator[Case]:
    """A Linear, columns of a wider result, and kv_b in its uses; slots without rows and rows
    without slots.
    """
    sizes = ((1, 1, 1, 1), (2, 16, 48, 33), (4, 16, 128, 70), (3, 48, 77, 257))
    for slots, rank, width, out in sizes:
        for rows in (0, 1, 7, 70) if slots == 4 else (9,):
            label = f"{rows} rows, {slots} slots of rank {rank}, {width} to {out}"
            yield _case(facts, label, rows, (1, 1, 1, 1), (slots, rank, width, out))
    for rows in (0, 3):
        for label, groups in (
            ("group per head of x and y", (5, 5, 1, 5)),
            ("group per head of b", (1, 1, 5, 5)),
            ("group per head of x and b", (5, 1, 5, 5)),
            ("group per head of all", (3, 3, 3, 3)),
        ):
            yield _case(facts, f"{label}, {rows} rows", rows, groups, (3, 16, 40, 24))
    yield _case(facts, "no row has an adapter", 6, (1, 1, 1, 1), (2, 16, 32, 48), none=True)
    make = Maker(facts, label := "awkward rows")
    y, x, a, b, adapters = _arguments(make, 8, (1, 1, 1, 1), (2, 16, 64, 32))
    adapters[:] = torch.tensor([0, 1, -1, 0, 1, 1, 0, -1])
    x[1], x[2], x[3] = float("nan"), float("nan"), x[3] * 500
    yield case(label, facts, y, x, a, b, adapters, written=(0,))


_Sizes = tuple[int, int, int, int]


def _case(
    facts: Facts, label: str, rows: int, groups: _Sizes, sizes: _Sizes, none: bool = False
) -> Case:
    y, x, a, b, adapters = _arguments(Maker(facts, label), rows, groups, sizes)
    if none:
        adapters.fill_(-1)
    return case(label, facts, y, x, a, b, adapters, written=(0,))


def _arguments(
    make: Maker, rows: int, groups: _Sizes, sizes: _Sizes
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """groups: of x, a, b and y. The last slot's upper half of the ranks is filled with zeros."""
    slots, rank, width, out = sizes
    of_x, of_a, of_b, of_y = groups
    y = make.inside(make.normal(rows, of_y, out))
    x = make.inside(make.normal(rows, of_x, width))
    a = make.normal(of_a, slots, rank, width, scale=width**-0.5)
    b = make.normal(of_b, slots, rank, out)
    a[:, -1, (rank + 1) // 2 :] = 0
    b[:, -1, (rank + 1) // 2 :] = 0
    adapters = make.integers(-1, slots, rows).to(torch.int32)
    return y, x, a, b, adapters
