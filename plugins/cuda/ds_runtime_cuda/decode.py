"""What the adapters of MLA decode share: a row of page table and a length per query."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_runtime.api import Batch, DecodePart, Limits

LATENT, ROPE = 512, 64  # what the libraries' kernels are made for


@dataclass
class Queries:
    """Step state. table [rows, pages] int32, lens [rows] int32; the first `count` rows count.

    Every query is a row of its own, also where a sequence brings several.
    """

    table: Tensor
    lens: Tensor
    count: int = 0
    part: DecodePart | None = None
    spread: tuple[tuple[int, ...], Tensor, Tensor] | None = None  # of the last step

    @staticmethod
    def make(limits: Limits) -> Queries:
        rows = limits.max_sequences * limits.max_queries
        shape = (rows, limits.max_pages_per_sequence)
        return Queries(
            torch.zeros(shape, dtype=torch.int32, device=limits.device),
            torch.ones(rows, dtype=torch.int32, device=limits.device),
        )

    @property
    def host_lens(self) -> tuple[int, ...]:
        """What each of the rows sees, on the host."""
        if self.part is None or not self.part.q_lens:
            return () if self.part is None else self.part.host_kv_lens
        pairs = zip(self.part.host_kv_lens, self.part.q_lens, strict=True)
        return tuple(seen - b for seen, n in pairs for b in reversed(range(n)))

    def fill(self, batch: Batch) -> None:
        """The rows of a step."""
        self.part, self.count = batch.decode, 0
        if self.part is None or not self.part.size:
            self.part = None
            return
        table, lens = self.part.page_table, self.part.kv_lens
        if self.part.q_lens:
            owner, behind = self._rows(self.part.q_lens)
            table, lens = table[owner], lens[owner] - behind
        self.count = table.shape[0]
        self.table[: self.count, : table.shape[1]].copy_(table)
        self.lens[: self.count].copy_(lens)

    def _rows(self, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The sequence of each row, and how many of its queries follow it: [rows] on the device.
        A captured step's state sees the same counts each time, and makes them once."""
        if self.spread is None or self.spread[0] != counts:
            owner = np.repeat(np.arange(len(counts)), counts)
            behind = np.concatenate([np.arange(n)[::-1] for n in counts]).astype(np.int32)
            there, device = torch.from_numpy, self.lens.device
            self.spread = (
                counts,
                there(owner).to(device, non_blocking=True),
                there(behind).to(device, non_blocking=True),
            )
        return self.spread[1:]
