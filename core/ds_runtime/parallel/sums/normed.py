"""Sums over ranks that wait for the add and the norm after them, to be one kernel with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ds_runtime.parallel.sums.overlapped import Started
from ds_runtime.platform.contract import NormedSum

WIDEST = 1 << 14
"""Values of a row, at most."""


def takes(x: Tensor) -> bool:
    """Whether such a kernel takes rows like these."""
    fits = x.dim() == 2 and x.dtype == torch.bfloat16
    return fits and x.shape[1] % 8 == 0 and x.shape[1] <= WIDEST


@dataclass(frozen=True, slots=True)
class Unsummed:
    """A rank's part of a sum [rows, width] that nobody has made yet. Every rank has one, and uses
    it alike, once."""

    part: Tensor
    sum_up: Callable[[Tensor], Tensor]
    norm: NormedSum

    @property
    def shape(self) -> torch.Size:
        return self.part.shape

    def __getitem__(self, rows: Tensor) -> Unsummed:
        """Those rows, of which every rank names the same."""
        return Unsummed(self.part[rows], self.sum_up, self.norm)

    def summed(self) -> Tensor:
        """The sum alone, for what is not fused with it."""
        return self.sum_up(self.part)

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As AddRmsNorm of the sum; `residual` must not be used afterwards."""
        return self.norm(self.part, residual, weight, eps)

    def add_norm_quantized(
        self, residual: Tensor, weight: Tensor, eps: float, ue8m0: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As AddRmsNormQuantize of the sum, by groups of `SCALED_BY`, whose multiple the width
        is; `residual` must not be used afterwards."""
        return self.norm.quantized(self.part, residual, weight, eps, ue8m0)


Summable: TypeAlias = Tensor | Unsummed | Started
"""A sum over ranks, what becomes one in the norm after it, or one that is under way."""
