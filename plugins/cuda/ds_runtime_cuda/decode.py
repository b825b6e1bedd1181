"""What the adapters of MLA decode share: a row of page table and a length per query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_runtime.api import Batch, DecodePart, Limits, RowOwners

LATENT, ROPE = 512, 64  # what the libraries' kernels are made for


@dataclass
class Queries:
    """Step state. table [rows, pages] int32, lens [rows] int32; the first `count` rows count.

    Every query is a row of its own, also where a sequence brings several.
    """

    table: Tensor
    lens: Tensor
    owners: RowOwners
    count: int = 0
    part: DecodePart | None = None

    @staticmethod
    def make(limits: Limits) -> Queries:
        rows = limits.max_sequences * limits.max_queries
        shape = (rows, limits.max_pages_per_sequence)
        return Queries(
            torch.zeros(shape, dtype=torch.int32, device=limits.device),
            torch.ones(rows, dtype=torch.int32, device=limits.device),
            RowOwners(limits.device),
        )

    @property
    def host_lens(self) -> tuple[int, ...]:
        """What each of the rows sees, on the host."""
        if self.part is None or not self.part.q_lens:
            return () if self.part is None else self.part.host_kv_lens
        pairs = zip(self.part.host_kv_lens, self.part.q_lens, strict=True)
        return tuple(seen - b for seen, n in pairs for b in reversed(range(n)))

    def fill(self, batch: Batch) -> None:
        """The rows of a step, at places that never move."""
        table, lens = self.table, self.lens
        self.show(batch)
        if self.count:
            table[: self.count, : self.table.shape[1]].copy_(self.table)
            lens[: self.count].copy_(self.lens)
        self.table, self.lens = table, lens

    def show(self, batch: Batch) -> None:
        """The rows of a step, as they lie in it: for kernels that prepare on the device."""
        self.part, self.count = batch.decode, 0
        if self.part is None or not self.part.size:
            self.part = None
            return
        self.table, self.lens = self.part.page_table, self.part.kv_lens
        if self.part.q_lens:
            owner, behind = self.owners.of(self.part.q_lens)
            self.table = self.table.index_select(0, owner)
            self.lens = self.lens.index_select(0, owner) - behind
        self.count = self.table.shape[0]
