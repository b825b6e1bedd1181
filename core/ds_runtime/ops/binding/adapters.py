"""Kernels written for the previous version of a contract, called as the present one says.

One adapter per op whose contract has changed, named after it (`Op.adapter`). It takes what the
kernel's `fn` names and returns the same by the present version.

The first release's contracts have version 1. Version 0 of mla_decode is the older generation that
keeps this mechanism tried: tests/golden/older_generation is a plugin of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ds_runtime.ops.batch import Batch, DecodePart, Limits
from ds_runtime.ops.reference.attention.dense import rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.attention.decode import MlaDecode


def mla_decode(make: Callable[[Facts], MlaDecode]) -> Callable[[Facts], MlaDecode]:
    """0 → 1: one row per sequence, then several."""
    return lambda facts: _OneRow(make(facts))


class _OneRow:
    """Shows every row of a sequence as a sequence of its own, which sees as much."""

    def __init__(self, kernel: MlaDecode) -> None:
        self._kernel = kernel

    def state(self, limits: Limits) -> Any:
        rows = limits.max_sequences * limits.max_queries
        return self._kernel.state(replace(limits, max_sequences=rows, max_queries=1))

    def prepare(self, state: Any, batch: Batch) -> None:
        if batch.decode is not None and batch.decode.q_lens:
            batch = replace(batch, decode=_by_row(batch.decode))
        self._kernel.prepare(state, batch)

    def run(self, state: Any, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        return self._kernel.run(state, q, cache, scale)


def _by_row(part: DecodePart) -> DecodePart:
    sequences, lens = zip(*rows_of(part), strict=True)
    device = part.page_table.device
    table = part.page_table[torch.tensor(sequences, device=device)]
    kv_lens = torch.tensor(lens, dtype=part.kv_lens.dtype, device=device)
    return DecodePart(table, kv_lens, lens)
