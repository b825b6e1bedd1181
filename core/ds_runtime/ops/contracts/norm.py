"""Norm contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    from torch import Tensor

_REF = "ds_runtime.ops.reference.norm"
_TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 2e-3}


class RmsNorm(Protocol):
    """y = x / sqrt(mean(x²) + eps) · weight; statistics in fp32 at least, result in x.dtype.

    x: [tokens, hidden], last dim contiguous, rows may be strided. weight: [hidden], x.dtype or
    float32. Returns a new contiguous tensor; x is not modified. tokens == 0 is legal.
    """

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddRmsNorm(Protocol):
    """(rms_norm(x + residual), x + residual): the residual stream of a pre-norm block. A fusion.

    x, residual: [tokens, hidden] of one dtype, last dim contiguous, rows may be strided.
    Returns (normed, summed), both contiguous [tokens, hidden]. `summed` may share storage with
    `residual`, so the caller must not use `residual` afterwards; x is not modified.
    tokens == 0 is legal.
    """

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class RmsNormQuantize(Protocol):
    """QuantizeGroup of RmsNorm. A fusion.

    x, weight and eps as in RmsNorm, hidden a multiple of `group`; group, ue8m0 and what comes back
    as in QuantizeGroup. The norm is rounded to x.dtype before it is quantised.
    """

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
    ) -> tuple[Tensor, Tensor]: ...


class AddRmsNormQuantize(Protocol):
    """QuantizeGroup of AddRmsNorm's norm. A fusion.

    x, residual, weight and eps as in AddRmsNorm, hidden a multiple of `group`; group and ue8m0 as
    in QuantizeGroup. Returns (codes, scale, summed): the norm, rounded to x.dtype before it is
    quantised, as QuantizeGroup gives it, and the sum as AddRmsNorm does.
    """

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, ue8m0: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...


RMS_NORM = Op(
    name="rms_norm",
    protocol=f"{__name__}:RmsNorm",
    reference=f"{_REF}:rms_norm",
    samples=f"{_REF}:rms_norm_samples",
    tolerance=_TOLERANCE,
    summary="root-mean-square norm",
)

ADD_RMS_NORM = Op(
    name="add_rms_norm",
    protocol=f"{__name__}:AddRmsNorm",
    reference=f"{_REF}:add_rms_norm",
    samples=f"{_REF}:add_rms_norm_samples",
    tolerance=_TOLERANCE,
    composition=f"{__name__}:compose_add_rms_norm",
    uses=("rms_norm",),
    summary="residual add and norm, fused",
)


RMS_NORM_QUANTIZE = Op(
    name="rms_norm_quantize",
    protocol=f"{__name__}:RmsNormQuantize",
    reference=f"{_REF}:rms_norm_quantize",
    samples=f"{_REF}:rms_norm_quantize_samples",
    tolerance={"float32": 4e-2, "bfloat16": 4e-2, "float16": 4e-2},  # of e4m3
    optional=True,
    uses=("rms_norm",),
    summary="root-mean-square norm and FP8 quantisation, fused",
)


ADD_RMS_NORM_QUANTIZE = Op(
    name="add_rms_norm_quantize",
    protocol=f"{__name__}:AddRmsNormQuantize",
    reference=f"{_REF}:add_rms_norm_quantize",
    samples=f"{_REF}:add_rms_norm_quantize_samples",
    tolerance={"float32": 4e-2, "bfloat16": 4e-2, "float16": 4e-2},  # of e4m3
    optional=True,
    uses=("add_rms_norm",),
    summary="residual add, norm and FP8 quantisation, fused",
)


def compose_add_rms_norm(
    ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """ADD_RMS_NORM over the platform's own rms_norm."""
    summed = x + residual
    return ops.rms_norm(summed, weight, eps), summed
