"""How many tokens chose each routed expert, counted where they are computed."""

from __future__ import annotations

import time

import torch
from torch import Tensor

PERIOD = 2.0
"""Seconds between two readings while there is work: one waits for the steps that were launched."""


class ExpertCounts:
    """Of the layers of one model, on one device. A captured step counts as well: sums lie where
    they lie. Rows that fill up a step count nothing.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        """experts: routed ones of a layer."""
        self._experts, self._device = experts, device
        self._sums: dict[int, Tensor] = {}
        self._read: dict[int, list[int]] = {}
        self._due = 0.0

    def of(self, layer: int) -> Tensor:
        """Where a layer's are summed: [experts] int64."""
        kept = torch.zeros(self._experts, dtype=torch.int64, device=self._device)
        return self._sums.setdefault(layer, kept)

    def read(self, now: bool) -> dict[int, list[int]]:
        """Since the last `clear`, by layer: of this moment, or of one in the last `PERIOD`."""
        if self._sums and (now or time.monotonic() >= self._due):
            every = torch.stack(list(self._sums.values())).tolist()
            self._read = dict(zip(self._sums, every, strict=True))
            self._due = time.monotonic() + PERIOD
        return self._read

    def clear(self) -> None:
        """Begin at 0."""
        for sums in self._sums.values():
            sums.zero_()


def count_chosen(sums: Tensor, ids: Tensor, slots: Tensor) -> None:
    """Add what rows chose to `sums`. ids: [rows, k] of routed experts; slots: of all tokens of a
    step as in Batch, negative where a row is none; fewer rows than these are all tokens.
    """
    if slots.shape[0] == ids.shape[0]:
        real = (slots >= 0).to(sums.dtype)
    else:
        real = sums.new_ones(ids.shape[0])
    sums.index_add_(0, ids.flatten(), real.unsqueeze(1).expand(ids.shape).flatten())
