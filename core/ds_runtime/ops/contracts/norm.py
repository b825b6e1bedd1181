"""Norm contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.results import codes, form
from ds_runtime.ops.contracts.work import GROUP, coded, rows_of
from ds_runtime.ops.declare import Area, Cost, later, op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.declare import OpWork
    from ds_runtime.ops.reference.cases import Case
    from ds_runtime.ops.reference.inputs import TrueInputs

_REF = "ds_runtime.ops.reference.norm"
_TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 2e-3}
_CODES = {"float32": 4e-2, "bfloat16": 4e-2, "float16": 4e-2}  # of e4m3
_SUM = 8e-3  # of two values of a compute dtype
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
judging = later("ds_runtime.ops.reference.judging")
reference = later(_REF)


class RmsNorm(Protocol):
    """y = x / sqrt(mean(x²) + eps) · weight; statistics in fp32 at least, result in x.dtype.

    * x: [tokens, hidden], last dim contiguous, rows may be strided.
    * weight: [hidden], x.dtype or float32.

    Returns a new contiguous [tokens, hidden]; x is not modified. tokens == 0 is legal. Source:
    arXiv 1910.07467.
    """

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddRmsNorm(Protocol):
    """(rms_norm(x + residual), x + residual): the residual stream of a pre-norm block. A fusion.

    * x, residual: [tokens, hidden] of one dtype, last dim contiguous, rows may be strided.
    * weight, eps: as in RmsNorm.

    Returns (normed, summed), both contiguous [tokens, hidden] in x.dtype. `summed` may share
    storage with `residual`, so the caller must not use `residual` afterwards; x is not modified.
    tokens == 0 is legal.
    """

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class RmsNormQuantize(Protocol):
    """QuantizeGroup of RmsNorm. A fusion.

    * x, weight, eps: as in RmsNorm, hidden a multiple of `group`.
    * group, ue8m0: as in QuantizeGroup.

    Returns (codes, scale) as QuantizeGroup does. The norm is rounded to x.dtype before it is
    quantised.
    """

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
    ) -> tuple[Tensor, Tensor]: ...


class AddRmsNormQuantize(Protocol):
    """QuantizeGroup of AddRmsNorm's norm. A fusion.

    * x, residual, weight, eps: as in AddRmsNorm, hidden a multiple of `group`.
    * group, ue8m0: as in QuantizeGroup.

    Returns (codes, scale, summed): the first two as QuantizeGroup returns them, the sum as in
    AddRmsNorm. The norm is rounded to x.dtype before it is quantised.
    """

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def compose_add_rms_norm(
    ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """ADD_RMS_NORM over the platform's own rms_norm."""
    summed = x + residual
    return ops.rms_norm(summed, weight, eps), summed


def rms_norm_samples(facts: Facts) -> Iterator[Case]:
    """Sizes, strides, extremes, a float32 weight with low-precision activations."""
    for tokens, hidden in ((0, 64), (1, 1), (1, 576), (3, 129), (17, 512)):
        make = cases.Maker(facts, label := f"{tokens}x{hidden}")
        yield cases.case(label, facts, make.normal(tokens, hidden), make.normal(hidden), 1e-6)
    for label, scale in (("large", 1e4), ("tiny", 1e-4)):
        make = cases.Maker(facts, label)
        yield cases.case(label, facts, make.normal(5, 192, scale=scale), make.normal(192), 1e-6)
    make = cases.Maker(facts, "strided")
    yield cases.case("strided", facts, make.inside(make.normal(9, 200)), make.normal(200), 1e-5)
    x = make.normal(4, 128)
    x[2] = 0
    yield cases.case("zero row", facts, x, make.normal(128), 1e-6)
    weight = make.normal(128, dtype=torch.float32)
    yield cases.case("float32 weight", facts, make.normal(6, 128), weight, 1e-6)


def add_rms_norm_samples(facts: Facts) -> Iterator[Case]:
    """As for rms_norm; the kernel may overwrite the residual."""
    shapes = ((0, 64), (1, 7), (3, 130), (33, 512))
    for tokens, hidden in shapes:
        make = cases.Maker(facts, label := f"{tokens}x{hidden}")
        x, residual = make.normal(tokens, hidden), make.normal(tokens, hidden, scale=3)
        yield cases.Case(
            label, facts, (cases.Call((x, residual, make.normal(hidden), 1e-6), free=(1,)),)
        )
    make = cases.Maker(facts, "strided")
    x, residual = make.inside(make.normal(5, 96)), make.inside(make.normal(5, 96), 1, 2)
    yield cases.Case(
        "strided", facts, (cases.Call((x, residual, make.normal(96), 1e-6), free=(1,)),)
    )
    x, residual = make.normal(5, 96, scale=100), make.normal(5, 96, scale=1e4)
    weight = make.normal(96, dtype=torch.float32)
    yield cases.Case(
        "large, float32 weight", facts, (cases.Call((x, residual, weight, 1e-6), free=(1,)),)
    )


def rms_norm_quantize_samples(facts: Facts) -> Iterator[Case]:
    """Both scale kinds, groups of zeros, outliers, wide and strided rows."""
    for ue8m0 in (False, True):
        kind = "power-of-two" if ue8m0 else "float"
        for tokens, n in ((0, 128), (1, 1536), (7, 384), (1, 16384)):
            make = cases.Maker(facts, label := f"{kind} {tokens}x{n}")
            yield cases.case(label, facts, make.normal(tokens, n), make.normal(n), 1e-6, 128, ue8m0)
        make = cases.Maker(facts, label := f"{kind} awkward")
        x = make.normal(70, 256)
        x[1, :128], x[2, 7], x[3] = 0, 3e4, x[3] * 1e-6
        weight = make.normal(256, dtype=torch.float32)
        yield cases.case(label, facts, make.inside(x), weight, 1e-6, 128, ue8m0)


def add_rms_norm_quantize_samples(facts: Facts) -> Iterator[Case]:
    """As for rms_norm_quantize; the kernel may overwrite the residual."""
    for sample in rms_norm_quantize_samples(facts):
        ((x, *rest),) = (call.args for call in sample.calls)
        make = cases.Maker(facts, sample.label)
        residual = make.inside(make.normal(*x.shape, scale=2), 1, 2)
        call = cases.Call((x, residual, *rest), free=(1,))
        yield cases.Case(sample.label, sample.facts, (call,))
        if "awkward" not in sample.label:
            whole = cases.Call((x, make.normal(*x.shape), *rest), free=(1,))
            yield cases.Case(f"{sample.label}, contiguous", sample.facts, (whole,))


def _judge(*given: Any) -> Any:
    return judging.fused_codes(reference.rms_norm, *given)


def _judge_added(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Any:
    """Codes as of other fusions, and the sum."""
    error, failure = judging.disagreement(got[2], want[2], _SUM)
    if failure:
        return error, f"sum: {failure}"
    x, residual, *rest = args
    return _judge((x + residual, *rest), got[:2], want[:2], tolerance)


def _rows(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return p.normal(tokens, p.width), p.normal(p.width), 1e-6


def _two_rows(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return p.normal(tokens, p.width), *_rows(p, tokens)


def _quantised_rows(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return *_rows(p, tokens), GROUP, False


def _two_quantised_rows(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return *_two_rows(p, tokens), GROUP, False


def _normed(parts: int, written: int, codes: bool) -> Callable[[Sizes, int], OpWork]:
    """parts: rows of the model's width that are read, written: that are written, beside codes."""

    def work(s: Sizes, tokens: int) -> OpWork:
        row = s.width * s.item
        writes = written * row + (coded(s.width) if codes else 0.0)
        return rows_of(tokens, parts * row, writes, 4.0 * s.width, once=row)

    return work


class NormOps(Area):
    """Norms, with the residual stream and with the quantisation after them."""

    rms_norm: RmsNorm = op(
        reference=f"{_REF}:rms_norm",
        tolerance=_TOLERANCE,
        results={"": lambda f, x, *_: (form(x),)},
        rows={"": (0,)},
        contiguous=True,
        compiles=True,
        cost=Cost({"": (_rows, _normed(1, 1, False))}, by_width=True),
        summary="root-mean-square norm",
    )
    add_rms_norm: AddRmsNorm = op(
        reference=f"{_REF}:add_rms_norm",
        tolerance=_TOLERANCE,
        results={"": lambda f, x, *_: (form(x), form(x))},
        rows={"": (0, 1)},
        contiguous=True,
        composition=f"{__name__}:compose_add_rms_norm",
        uses=("rms_norm",),
        compiles=True,
        cost=Cost({"": (_two_rows, _normed(2, 2, False))}, by_width=True),
        summary="residual add and norm, fused",
    )
    rms_norm_quantize: RmsNormQuantize = op(
        reference=f"{_REF}:rms_norm_quantize",
        tolerance=_CODES,
        results={"": lambda f, x, w, eps, group, u: codes(tuple(x.shape), group)},
        rows={"": (0,)},
        judge=_judge,
        optional=True,
        uses=("rms_norm",),
        compiles=True,
        cost=Cost({"": (_quantised_rows, _normed(1, 0, True))}, by_width=True),
        summary="root-mean-square norm and FP8 quantisation, fused",
    )
    add_rms_norm_quantize: AddRmsNormQuantize = op(
        reference=f"{_REF}:add_rms_norm_quantize",
        tolerance=_CODES,
        results={
            "": lambda f, x, r, w, eps, group, u: (*codes(tuple(x.shape), group), form(x)),
        },
        rows={"": (0, 1)},
        judge=_judge_added,
        optional=True,
        uses=("add_rms_norm",),
        compiles=True,
        cost=Cost({"": (_two_quantised_rows, _normed(2, 1, True))}, by_width=True),
        summary="residual add, norm and FP8 quantisation, fused",
    )
