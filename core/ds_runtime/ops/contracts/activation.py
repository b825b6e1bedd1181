"""Activation contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ds_runtime.ops.contracts.results import codes, half, name_of
from ds_runtime.ops.contracts.work import GROUP, coded, rows_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case

_REF = "ds_runtime.ops.reference.activation"
cases = later("ds_runtime.ops.reference.cases")
judging = later("ds_runtime.ops.reference.judging")
reference = later(_REF)


class SiluMul(Protocol):
    """silu(gate) · up, the SwiGLU activation.

    * gate_up: [tokens, 2 · n], gate in the first n columns; rows may be strided.

    Returns a new contiguous [tokens, n] in the input's dtype. tokens == 0 is legal. Source: arXiv
    2002.05202.
    """

    def __call__(self, gate_up: Tensor) -> Tensor: ...


class SiluMulQuantize(Protocol):
    """QuantizeGroup of SiluMul. A fusion.

    * gate_up: [tokens, 2 · n] as in SiluMul, n a multiple of `group`.
    * group, ue8m0: as in QuantizeGroup.

    Returns (codes [tokens, n], scale) as QuantizeGroup does. The product is rounded to the input's
    dtype before it is quantised.
    """

    def __call__(self, gate_up: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]: ...


def silu_mul_samples(facts: Facts) -> Iterator[Case]:
    """Odd widths, strides, both ends of the sigmoid."""
    for tokens, n in ((0, 64), (1, 1), (3, 33), (17, 256)):
        make = cases.Maker(facts, label := f"{tokens}x{n}")
        yield cases.case(label, facts, make.normal(tokens, 2 * n))
    make = cases.Maker(facts, "strided")
    yield cases.case("strided", facts, make.inside(make.normal(5, 2 * 50)))
    yield cases.case("large", facts, make.normal(5, 2 * 64, scale=100))
    yield cases.case("small", facts, make.normal(5, 2 * 64, scale=0.1))


def silu_mul_quantize_samples(facts: Facts) -> Iterator[Case]:
    """Both scale kinds, groups of zeros, both ends of the sigmoid, strided rows."""
    for ue8m0 in (False, True):
        kind = "power-of-two" if ue8m0 else "float"
        for tokens, n in ((0, 128), (1, 2304), (70, 384)):
            make = cases.Maker(facts, label := f"{kind} {tokens}x{n}")
            yield cases.case(label, facts, make.normal(tokens, 2 * n), 128, ue8m0)
        make = cases.Maker(facts, label := f"{kind} awkward")
        x = make.normal(5, 512, scale=10)
        x[1, :128], x[2, 7], x[3] = 0, 100, x[3] * 1e-6
        yield cases.case(label, facts, make.inside(x), 128, ue8m0)


def _multiplied(s: Sizes, tokens: int) -> OpWork:
    return rows_of(tokens, 2 * s.width * s.item, s.width * s.item, 5.0 * s.width)


def _rounded(s: Sizes, tokens: int) -> OpWork:
    return rows_of(tokens, 2 * s.width * s.item, coded(s.width), 5.0 * s.width)


class ActivationOps(Area):
    """Ops on what a Linear gave."""

    silu_mul: SiluMul = op(
        reference=f"{_REF}:silu_mul",
        tolerance={"float32": 1e-5, "bfloat16": 1.2e-2, "float16": 2e-3},
        results={"": lambda f, x: ((half(x), name_of(x)),)},
        rows={"": (0,)},
        contiguous=True,
        compiles=True,
        cost=Cost({"": (lambda p, n: (p.normal(n, 2 * p.width),), _multiplied)}, by_width=True),
        summary="SwiGLU activation",
    )
    silu_mul_quantize: SiluMulQuantize = op(
        reference=f"{_REF}:silu_mul_quantize",
        tolerance={"float32": 4e-2, "bfloat16": 4e-2, "float16": 4e-2},  # of e4m3
        results={"": lambda f, x, group, u: codes(half(x), group)},
        rows={"": (0,)},
        judge=lambda *given: judging.fused_codes(reference.silu_mul, *given),
        optional=True,
        uses=("silu_mul",),
        compiles=True,
        cost=Cost(
            {"": (lambda p, n: (p.normal(n, 2 * p.width), GROUP, False), _rounded)}, by_width=True
        ),
        summary="SwiGLU activation and FP8 quantisation, fused",
    )
