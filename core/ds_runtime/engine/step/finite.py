"""Whether the model's logits are numbers: asked on the device, beside the draw, row by row.

The answer travels with the tokens (`Handle.finite`), so that nobody waits for it.
"""

from __future__ import annotations

from torch import Tensor


def finite_rows(logits: Tensor) -> Tensor:
    """[rows] bool for logits [rows, vocab] float32, as the model gave them: masks and biases come
    later, and may well forbid.

    One reduction: NaN or an infinity among the terms of a sum leaves NaN or an infinity, on every
    device. A sum of numbers would overflow from a mean of 2e33 on, which no model means.
    """
    total = logits.sum(-1)
    return (total - total) == 0
