"""Rotary embedding contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.results import form
from ds_runtime.ops.contracts.work import ID, by_heads, rows_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case
    from ds_runtime.ops.reference.inputs import TrueInputs

torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")


class Rope(Protocol):
    """Rotate interleaved pairs (x0,x1),(x2,x3)… of the last dim by the angle of each position.

    * q: [tokens, heads, d] and k: [tokens, d], d even, last dim contiguous. Outer dims may be
      strided (slices of wider tensors).
    * positions: [tokens] int64.
    * cos_sin: [max_position, d] float32, indexed by position. The first d/2 columns have cos, the
      rest has sin. YaRN is already applied.

    (a, b) → (a·cos − b·sin, b·cos + a·sin), computed in fp32. Pairs stay interleaved. Returns new
    contiguous tensors in the input's dtype. tokens == 0 is legal.
    Source: arXiv 2104.09864.
    """

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]: ...


def rope_samples(facts: Facts) -> Iterator[Case]:
    """Slices of wider tensors as the model makes them, unsorted and repeated positions."""
    d = facts.dims["qk_rope"]
    for tokens, heads in ((0, 2), (1, 1), (5, 3), (33, 4)):
        make = cases.Maker(facts, label := f"{tokens} tokens, {heads} heads")
        q, k = make.normal(tokens, heads, d), make.normal(tokens, d)
        yield cases.case(label, facts, q, k, make.integers(0, 50, tokens), make.cos_sin(50, d))
    make = cases.Maker(facts, "slices")
    q, k = make.inside(make.normal(7, 3, d), 16, 0), make.inside(make.normal(7, d), 32, 0)
    far = torch.tensor([0, 4999, 17, 17, 3, 4096, 1])
    yield cases.case("slices, far positions", facts, q, k, far, make.cos_sin(5000, d))
    q, k = make.normal(4, 2, d, scale=300), make.normal(4, d, scale=300)
    yield cases.case("large", facts, q, k, torch.arange(4), make.cos_sin(4, d))
    q, k = make.normal(3, 2, 2), make.normal(3, 2)
    yield cases.case("one pair", facts, q, k, torch.arange(3), make.cos_sin(9, 2))


def _inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    heads, nope, d = p.dims("heads", "qk_nope", "qk_rope")
    q = p.normal(tokens, heads, nope + d)[..., nope:]
    return q, p.normal(tokens, d), p.positions(tokens), p.cos_sin(tokens)


def _rotated(s: Sizes, tokens: int) -> OpWork:
    heads, d = s.dims("heads", "qk_rope")
    each = (heads + 1) * d
    return rows_of(tokens, each * s.item + ID + 4 * d, each * s.item, 3.0 * each)


class RotationOps(Area):
    """Positions."""

    rope: Rope = op(
        reference="ds_runtime.ops.reference.attention.rope:rope",
        tolerance={"float32": 1e-5, "bfloat16": 8e-3, "float16": 2e-3},
        results={"": lambda f, q, k, *_: (form(q), form(k))},
        rows={"": (0, 1, 2)},
        contiguous=True,
        sized=True,
        plain=True,
        compiles=True,
        cost=Cost({"": (_inputs, _rotated)}, size=by_heads),
        summary="interleaved rotary embedding of q and k",
    )
