"""Activation contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    from torch import Tensor

_REF = "ds_runtime.ops.reference.activation"


class SiluMul(Protocol):
    """silu(gate) · up. gate_up: [tokens, 2·n], gate in the first n columns; rows may be strided.

    Returns a new contiguous [tokens, n] in the input's dtype. tokens == 0 is legal.
    """

    def __call__(self, gate_up: Tensor) -> Tensor: ...


SILU_MUL = Op(
    name="silu_mul",
    protocol=f"{__name__}:SiluMul",
    reference=f"{_REF}:silu_mul",
    samples=f"{_REF}:silu_mul_samples",
    tolerance={"float32": 1e-5, "bfloat16": 1.2e-2, "float16": 2e-3},
    summary="SwiGLU activation",
)


class SiluMulQuantize(Protocol):
    """QuantizeGroup of SiluMul. A fusion.

    gate_up: [tokens, 2·n] as in SiluMul, n a multiple of `group`; group, ue8m0 and what comes back
    as in QuantizeGroup. The product is rounded to the input's dtype before it is quantised.
    """

    def __call__(self, gate_up: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]: ...


SILU_MUL_QUANTIZE = Op(
    name="silu_mul_quantize",
    protocol=f"{__name__}:SiluMulQuantize",
    reference=f"{_REF}:silu_mul_quantize",
    samples=f"{_REF}:silu_mul_quantize_samples",
    tolerance={"float32": 4e-2, "bfloat16": 4e-2, "float16": 4e-2},  # of e4m3
    optional=True,
    uses=("silu_mul",),
    summary="SwiGLU activation and FP8 quantisation, fused",
)
