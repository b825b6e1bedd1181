"""How results are held against the oracle's: by their error, and where a contract leaves freedom.

A verdict is (worst relative error, "" or what is wrong).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Verdict = tuple[float, str]

FP8_ROUNDING = 4e-2  # of e4m3: at most 2^-4 per value, 2.6e-2 in the mean square
_ROW_SLACK = 4.0  # one row may be this much worse than the whole


def relative_error(out: Tensor, oracle: Tensor) -> float:
    """‖out − oracle‖ / ‖oracle‖ in float64; inf unless every infinity and NaN is in its place.

    A NaN anywhere in `out` gives inf, also where the oracle has one: NaN never passes.
    """
    got, want = out.detach().cpu().to(torch.float64), oracle.detach().cpu().to(torch.float64)
    finite = want.isfinite()
    if got.shape != want.shape or not torch.equal(got.isfinite(), finite):
        return float("inf")
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return float("inf")
    if not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    difference, size = (got[finite] - want[finite]).norm(), want[finite].norm()
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / size)


def worst_row(out: Tensor, oracle: Tensor) -> float:
    """The largest error of a row (first dim), relative to the row but at least to a tenth of the
    usual row. One wrong row among many cannot hide in the norm of all."""
    if out.ndim < 2 or out.shape[0] < 2 or out.shape != oracle.shape:
        return 0.0
    got = out.detach().cpu().to(torch.float64).flatten(1)
    want = oracle.detach().cpu().to(torch.float64).flatten(1)
    finite = want.isfinite() & got.isfinite()
    difference = torch.where(finite, got - want, 0.0).norm(dim=1)
    size = torch.where(finite, want, 0.0).norm(dim=1)
    usual = size.square().mean().sqrt()
    return float((difference / size.clamp(min=max(float(usual) / 10, 1e-300))).max())


def disagreement(out: Tensor, oracle: Tensor, tolerance: float) -> tuple[float, str]:
    """(relative error, "" or what is wrong). Integers and tolerance 0 must agree exactly."""
    if not out.dtype.is_floating_point:
        same = out.shape == oracle.shape and torch.equal(out.cpu(), oracle.cpu().to(out.dtype))
        return (0.0, "") if same else (float("inf"), "integers differ")
    want = oracle.cpu().to(out.dtype) if tolerance == 0.0 else oracle
    error = relative_error(out, want)
    if not error <= tolerance:
        if out.isnan().any():
            return error, f"{int(out.isnan().sum())} NaN in the result"
        return error, f"relative error {error:.3g} is above {tolerance:.3g}"
    row = worst_row(out, want)
    if not row <= _ROW_SLACK * tolerance:
        return row, f"a row's relative error {row:.3g} is above {_ROW_SLACK:g} · {tolerance:.3g}"
    return error, ""


def wrong(said: str) -> Verdict:
    """Something that no tolerance allows."""
    return float("inf"), said


def decoded(pair: Sequence[Tensor], group: int) -> Tensor:
    """Codes times their scales, in float64 on the host."""
    q, scale = (t.cpu().to(torch.float64) for t in pair)
    return q * scale.repeat_interleave(group, dim=-1)


def powers_of_two(scale: Tensor) -> bool:
    """Whether all scales are."""
    return bool((torch.frexp(scale.cpu())[0] == 0.5).all())


def fused_codes(
    values: Callable[..., Tensor], args: Sequence[Any], got: Sequence[Tensor],
    want: Sequence[Tensor], tolerance: float,
) -> Verdict:  # fmt: skip
    """Of fusions with a quantisation, whose last arguments are group and ue8m0. What was rounded on
    the way moves scales a little, and those that are powers of two to the next. Codes must give
    `values` of the other arguments back."""
    *inputs, group, ue8m0 = args
    if ue8m0 and not powers_of_two(got[1]):
        return wrong("a scale is no power of two")
    ratio = got[1].cpu().to(torch.float64) / want[1].to(torch.float64)
    least, most = (0.5, 2.0) if ue8m0 else (0.99, 1.01)
    if ratio.numel() and not (least <= ratio.min() and ratio.max() <= most):
        return wrong(f"scales are {ratio.min():.3g} to {ratio.max():.3g} times those expected")
    return disagreement(decoded(got, group), values(*inputs), tolerance)
