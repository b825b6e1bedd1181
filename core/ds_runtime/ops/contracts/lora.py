"""Contract of low-rank adapters: what several of them add to a product, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.work import rows_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case, Maker
    from ds_runtime.ops.reference.inputs import TrueInputs

torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
_RANK, _SLOTS = 16, 4  # where it is timed


class LoraDelta(Protocol):
    """y[t, g] += (x[t, g] · a[g, s]ᵀ) · b[g, s] with s = adapters[t]; rows with s < 0 stay.

    * y: [rows, groups, out], written in place. x: [rows, groups or 1, in]. The last dim of both is
      contiguous, other dims may be strided. They do not overlap.
    * a: [groups or 1, slots, rank, in] and b: [groups or 1, slots, rank, out], contiguous, in
      x.dtype. Each slot has a pair, padded to `rank` with zeros. A groups dim of 1 means the same
      for every group.
    * adapters: [rows] int32, below the number of slots.

    Products accumulate in fp32. No row's NaN or infinity reaches another row, nor does an overflow
    of a slot reach a row of another slot. rows == 0 is legal. A Linear has one group. Absorbed kv_b
    has a group per head. There a is the head's rows of B and b is A, or the other way round.
    """

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None: ...


_Four = tuple[int, int, int, int]


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
    make = cases.Maker(facts, label := "awkward rows")
    y, x, a, b, adapters = _arguments(make, 8, (1, 1, 1, 1), (2, 16, 64, 32))
    adapters[:] = torch.tensor([0, 1, -1, 0, 1, 1, 0, -1])
    x[1], x[2], x[3] = float("nan"), float("nan"), x[3] * 500
    yield cases.case(label, facts, y, x, a, b, adapters, written=(0,))


def _case(
    facts: Facts, label: str, rows: int, groups: _Four, sizes: _Four, none: bool = False
) -> Case:
    y, x, a, b, adapters = _arguments(cases.Maker(facts, label), rows, groups, sizes)
    if none:
        adapters.fill_(-1)
    made: Case = cases.case(label, facts, y, x, a, b, adapters, written=(0,))
    return made


def _arguments(
    make: Maker, rows: int, groups: _Four, sizes: _Four
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


def _inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    out, cols = p.facts.shape
    return (
        p.normal(tokens, 1, out),
        p.normal(tokens, 1, cols),
        p.normal(1, _SLOTS, _RANK, cols),
        p.normal(1, _SLOTS, _RANK, out),
        (p.positions(tokens) % _SLOTS).to(torch.int32),
    )


def _added(s: Sizes, tokens: int) -> OpWork:
    out, cols = s.facts.shape
    once = _SLOTS * _RANK * (out + cols) * s.item
    flops = 2.0 * _RANK * (out + cols)
    return rows_of(tokens, (out + cols) * s.item + 4, out * s.item, flops, once)


class AdapterOps(Area):
    """Low-rank adapters."""

    lora_delta: LoraDelta = op(
        reference="ds_runtime.ops.reference.matrices.lora:lora_delta",
        tolerance={"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 3e-3},
        rows={"": (0, 1, 4)},
        writes=("y",),
        cost=Cost({"": (_inputs, _added)}),
        summary="what low-rank adapters add, several per batch",
    )
