"""Contract of low-rank adapters: what several of them add to a product, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    from torch import Tensor

_REF = "ds_runtime.ops.reference.matrices.lora"


class LoraDelta(Protocol):
    """y[t, g] += (x[t, g] · a[g, s]ᵀ) · b[g, s] with s = adapters[t]; rows with s < 0 stay.

    y: [rows, groups, out], written in place, last dim contiguous; x: [rows, groups or 1, in],
    last dim contiguous; both may be strided otherwise, and do not overlap. a: [groups or 1,
    slots, rank, in], b: [groups or 1, slots, rank, out], contiguous, in x.dtype: a pair per slot,
    filled up to `rank` with zeros. A groups dim of 1 means the same for every group. adapters:
    [rows] int32, below the number of slots. Products accumulate in fp32. No row's NaN or infinity
    reaches another row, nor does an overflow of a slot reach a row of another slot. rows == 0 is
    legal. A Linear has one group. kv_b absorbed has a group per head: the rows of B that belong
    to a head stand in for a where A itself stands in for b, and the other way round.
    """

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None: ...


LORA_DELTA = Op(
    name="lora_delta",
    protocol=f"{__name__}:LoraDelta",
    reference=f"{_REF}:lora_delta",
    samples=f"{_REF}:lora_delta_samples",
    tolerance={"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 3e-3},
    summary="what low-rank adapters add, several per batch",
)
