"""Rotary embedding contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    from torch import Tensor

_REF = "ds_runtime.ops.reference.attention.rope"


class Rope(Protocol):
    """Rotate interleaved pairs (x0,x1),(x2,x3)… of the last dim by the angle of each position.

    q: [tokens, heads, d] and k: [tokens, d], d even, last dim contiguous, outer dims may be
    strided (slices of wider tensors). positions: [tokens] int64. cos_sin: [max_position, d]
    float32, cos in the first d/2 columns, sin in the rest, indexed by position (YaRN already
    applied). (a, b) → (a·cos − b·sin, b·cos + a·sin), computed in fp32, result in the input's
    dtype, pairs stay interleaved. Returns new contiguous tensors. tokens == 0 is legal.
    """

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]: ...


ROPE = Op(
    name="rope",
    protocol=f"{__name__}:Rope",
    reference=f"{_REF}:rope",
    samples=f"{_REF}:rope_samples",
    tolerance={"float32": 1e-5, "bfloat16": 8e-3, "float16": 2e-3},
    summary="interleaved rotary embedding of q and k",
)
