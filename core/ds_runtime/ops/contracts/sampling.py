"""Sampling contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    from torch import Tensor

_REF = "ds_runtime.ops.reference.sampling"


class Sample(Protocol):
    """One token per row by inverse CDF, from one uniform number per row.

    logits: [rows, vocab] float32, penalties and masks already applied (−inf = forbidden).
    temperature: [rows] float32; 0 means argmax (lowest id at ties). top_k: [rows] int32, 0 = off.
    top_p, min_p: [rows] float32 (1 and 0 = off). uniform: [rows] float64 in [0, 1).
    Filters apply to softmax(logits / temperature), as: keep the top_k largest; of these keep the
    smallest set of largest whose renormalised sum reaches top_p (the first always stays); drop
    those below min_p · max. "Larger" goes by logit, and at equal logits the lower id comes first.
    The draw walks the kept tokens in order of rising id: the result is the first whose cumulative
    kept probability exceeds uniform · total. Without filters nothing needs to be sorted.
    Returns [rows] int64. Equal rows give equal results whatever else is in the batch.
    """

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
    ) -> Tensor: ...


class MaskLogits(Protocol):
    """Forbid tokens, row by row: their logits become −inf.

    logits: [rows, vocab] float32, last dim contiguous, rows may be strided. masks: [masks, words]
    int32 with words = ceil(vocab / 32): token t is allowed where bit t % 32 of word t // 32 is
    set; bits from vocab on mean nothing. which: [rows] int32, the mask of each row; negative: the
    row keeps every token. Several rows may share a mask. Returns a new contiguous [rows, vocab]
    float32; kept logits are copied bit for bit, NaN included. rows == 0 and masks == 0 are legal.
    """

    def __call__(self, logits: Tensor, masks: Tensor, which: Tensor) -> Tensor: ...


class Logprobs(Protocol):
    """Log-softmax of raw logits at given ids, and the best alternatives.

    logits: [rows, vocab] float32; ids: [rows] int64; top_n ≥ 0. Returns (chosen float32 [rows],
    values float32 [rows, top_n], top_ids int64 [rows, top_n]), falling, lower id first at ties.
    """

    def __call__(
        self, logits: Tensor, ids: Tensor, top_n: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


SAMPLE = Op(
    name="sample",
    protocol=f"{__name__}:Sample",
    reference=f"{_REF}:sample",
    samples=f"{_REF}:sample_samples",
    tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
    summary="temperature, top-k, top-p, min-p sampling",
)

MASK_LOGITS = Op(
    name="mask_logits",
    protocol=f"{__name__}:MaskLogits",
    reference=f"{_REF}:mask_logits",
    samples=f"{_REF}:mask_logits_samples",
    tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
    summary="forbid the tokens that a grammar does not allow",
)

LOGPROBS = Op(
    name="logprobs",
    protocol=f"{__name__}:Logprobs",
    reference=f"{_REF}:logprobs",
    samples=f"{_REF}:logprobs_samples",
    tolerance={"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5},
    summary="log-probabilities of chosen and best tokens",
)
