"""Logits of the ranks that divide the vocabulary, side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_runtime.parallel.sums.kinds import GATHERED_BY
from ds_runtime.platform.contract import Communicator


class Logits:
    """Of a group. most: bytes of the whole up to which one kernel gathers, where the group can set
    it up; 0 where it shall not. Every rank makes one at the same time, with the same `most`."""

    def __init__(self, group: Communicator, most: int = 0) -> None:
        self._group, self.most = group, 0
        self._at_once: Callable[[Tensor, Tensor], None] | None = None
        if most > 0:
            # A communicator that was written before `gather_logits` was in the contract has none.
            if hasattr(group, "gather_logits"):
                self._at_once = group.gather_logits(-(-most // group.size))
            if all(group.gather_objects(self._at_once is not None)):
                self.most = most
            else:
                self._at_once = None

    def __call__(self, part: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """part: [rows, n] of this rank, of the same shape on all. Returns the first `width` of
        size * n columns, [rows, width] in float32: in `out`, where that is given."""
        rows, n = part.shape
        fits = part.dtype == torch.bfloat16 and n % GATHERED_BY == 0
        if fits and self._size(part) <= self.most and self._at_once is not None:
            if out is None:
                out = torch.empty(rows, width, dtype=torch.float32, device=part.device)
            self._at_once(part.contiguous(), out)
            return out
        logits = self._group.all_gather(part)[:, :width]
        return logits.to(torch.float32) if out is None else out.copy_(logits)

    def _size(self, part: Tensor) -> int:
        return part.numel() * part.element_size() * self._group.size
