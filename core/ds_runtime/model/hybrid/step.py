"""One step as the layers of DeepSeek-V4 see it: whose its rows are, and what they see."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_runtime.model.indexer import decode_owners, longest, prefill_owners
from ds_runtime.ops.batch import Batch
from ds_runtime.ops.contracts.caches import Caches


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [first, first + count) of a step: those that decode, or those of prompts.

    page_table: as in DecodePart. owners: [count] int32, each row's sequence in it. blocks: [count]
    int64, that of its states, −1 for padding. positions: [count] int64. longest: tokens of the
    longest sequence, at most.
    """

    first: int
    decodes: bool
    page_table: Tensor
    owners: Tensor
    blocks: Tensor
    positions: Tensor
    longest: int

    def of(self, x: Tensor) -> Tensor:
        """The part's rows of x, which has a row for every one of the step."""
        return x[self.first : self.first + self.owners.shape[0]]

    def seen(self, ratio: int) -> Tensor:
        """How many compressed entries each row sees: [count] int32."""
        return ((self.positions + 1) // ratio).to(torch.int32)

    def ring(self, entries: int) -> Tensor:
        """The slot of each row in states of this many entries per block: [count] int64, −1 for
        padding and for rows whose slot a later one of their sequence has."""
        slots = self.blocks * entries + self.positions % entries
        count = self.owners.shape[0]
        rows = torch.arange(count, device=slots.device)
        last = torch.zeros(self.page_table.shape[0], dtype=torch.int64, device=slots.device)
        last.scatter_reduce_(0, self.owners.to(torch.int64), rows, "amax", include_self=True)
        lost = last[self.owners.to(torch.int64)] - rows >= entries
        return slots.masked_fill((self.blocks < 0) | lost, -1)

    def every(self, ratio: int, size: int, most: int | None = None) -> Tensor:
        """Slots of all entries that a row sees: [count, n] int32, −1 where there is none. size:
        entries of a page; most: that a row sees.
        """
        table = self.page_table
        count = table.shape[1] * size
        count = count if most is None else min(most, count)
        entries = torch.arange(count, dtype=torch.int32, device=table.device)
        slots = table[self.owners][:, entries // size] * size + entries % size
        return slots.masked_fill(entries >= self.seen(ratio).unsqueeze(1), -1)


@dataclass(frozen=True, slots=True)
class HybridStep:
    """Of one step what all layers share. ids: of tokens, of all rows that `exchange.enter` gives.
    blocks: [T] int64, as in RowSpan. tables: rotations, of layers with a window alone and of those
    with compressed entries. always: rows are scored however few entries they see.
    """

    batch: Batch
    caches: Caches
    ids: Tensor
    blocks: Tensor
    parts: tuple[RowSpan, ...]
    tables: tuple[Tensor, Tensor]
    always: bool
    _every: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        batch: Batch, caches: Caches, ids: Tensor, tables: tuple[Tensor, Tensor], always: bool
    ) -> HybridStep:
        assert batch.blocks is not None, "requests keep states"
        parts, found, sequences = list[RowSpan](), list[Tensor](), 0
        for part in (batch.decode, batch.prefill):
            if part is None:
                continue
            decodes = part is batch.decode
            if part is batch.decode:
                owners, most = decode_owners(part), max(part.host_kv_lens, default=0)
            else:
                assert batch.prefill is not None
                owners, most = prefill_owners(batch.prefill), longest(batch.prefill)
            first = sum(len(p.owners) for p in parts)
            rows = slice(first, first + owners.shape[0])
            own = batch.blocks[sequences:][owners.to(torch.int64)]
            own = torch.where(batch.slots[rows] < 0, -1, own)
            table, positions = part.page_table, batch.positions[rows]
            parts.append(RowSpan(first, decodes, table, owners, own, positions, most))
            found.append(own)
            sequences += table.shape[0]
        blocks = torch.cat(found) if found else batch.positions
        return HybridStep(batch, caches, ids, blocks, tuple(parts), tables, always)

    def closing(self, ratio: int) -> Tensor:
        """Where the entry goes of a window that a row closes: slots [T] int64, −1 for others."""
        batch = self.batch
        closes = ((batch.positions + 1) % ratio == 0) & (batch.slots >= 0)
        return torch.where(closes, batch.slots // ratio, -1)

    def every(self, part: RowSpan, ratio: int, size: int) -> Tensor:
        """`RowSpan.every` of all entries, made once for all layers."""
        key = part.first, ratio
        if key not in self._every:
            self._every[key] = part.every(ratio, size)
        return self._every[key]
