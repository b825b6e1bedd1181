"""What the adapters of MLA decode share: a row of page table and a length per query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_runtime.api import Batch, Limits

LATENT, ROPE = 512, 64  # what the libraries' kernels are made for


@dataclass
class Queries:
    """Step state. table [rows, pages] int32, lens [rows] int32; the first `count` rows count.

    Every query is a row of its own, also where a sequence brings several: `host_lens` says what
    each sees.
    """

    table: Tensor
    lens: Tensor
    count: int = 0
    host_lens: tuple[int, ...] = ()

    @staticmethod
    def make(limits: Limits) -> Queries:
        rows = limits.max_sequences * limits.max_queries
        shape = (rows, limits.max_pages_per_sequence)
        return Queries(
            torch.zeros(shape, dtype=torch.int32, device=limits.device),
            torch.ones(rows, dtype=torch.int32, device=limits.device),
        )

    def fill(self, batch: Batch) -> None:
        """The rows of a step."""
        part, self.count, self.host_lens = batch.decode, 0, ()
        if part is None or not part.size:
            return
        table, lens, self.host_lens = part.page_table, part.kv_lens, part.host_kv_lens
        if part.q_lens:
            counts = torch.tensor(part.q_lens)
            owner = torch.repeat_interleave(torch.arange(part.size), counts)
            last = counts.cumsum(0)[owner] - 1
            behind = (last - torch.arange(part.rows)).to(torch.int32)  # queries that follow
            self.host_lens = tuple(
                part.host_kv_lens[i] - b
                for i, b in zip(owner.tolist(), behind.tolist(), strict=True)
            )
            device = table.device
            table = table[owner.to(device, non_blocking=True)]
            lens = lens[owner.to(device, non_blocking=True)] - behind.to(device, non_blocking=True)
        self.count = table.shape[0]
        self.table[: self.count, : table.shape[1]].copy_(table)
        self.lens[: self.count].copy_(lens)
