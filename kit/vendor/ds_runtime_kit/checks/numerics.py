"""Numbers in tests: relative error against an oracle, and copies that keep their strides."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW_SLACK = 4.0  # one row may be this much worse than the whole


def copy_strided(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """A copy with the same strides, storage offset and gaps (a slice stays a slice)."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((n - 1) * stride for n, stride in steps)
    start = tensor.storage_offset()
    total = max(start + extent, tensor.untyped_storage().nbytes() // tensor.element_size())
    flat = tensor.as_strided((total,), (1,), 0).to(device=device, dtype=dtype, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride(), start)


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of the storage behind a tensor, gaps between rows included: a uint8 copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage()).clone()


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
    """The largest error of a row (first dim), relative to the row but at least to a tenth of
    the usual row: one wrong row among many cannot hide in the norm of all."""
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
