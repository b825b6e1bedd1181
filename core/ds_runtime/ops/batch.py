"""What one step computes, as tensors: the value that the engine hands to model and kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16  # int32: kernels choose wide loads by the alignment of what they get
TAIL = 64  # last tokens of a sequence of which each row of a tree says whether it sees them


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of a step, for buffers that `state` allocates once.

    max_tokens: rows of a step. max_sequences: sequences of a step. max_pages_per_sequence: columns
    of a page table. page_size: entries of a block of the op's cache. heads: of this rank. device:
    the torch device. max_queries: rows of one decoding sequence.
    """

    max_tokens: int
    max_sequences: int
    max_pages_per_sequence: int
    page_size: int
    heads: int
    device: Any
    max_queries: int = 1  # rows of one decoding sequence


@dataclass(frozen=True, slots=True)
class Segments:
    """Consecutive pieces of rows, of any lengths.

    lens: the lengths, on the host. cu: [len(lens) + 1] int32 on the device, 0 and the sums of the
    first 1, 2, … lengths.
    """

    lens: tuple[int, ...]
    cu: Tensor

    @property
    def total(self) -> int:
        """All rows."""
        return sum(self.lens)

    @property
    def longest(self) -> int:
        """Rows of the longest piece, 0 without any."""
        return max(self.lens, default=0)


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows [0, rows) of the batch, which attend the cache. A sequence has one new token, a few
    drafts, or a short chunk of a prompt after many cached tokens.

    * page_table: [size, max_pages] int32. Entries past a sequence's pages are undefined, but in
      range.
    * kv_lens: [size] int32 on the device, the tokens of each sequence with its new ones.
    * host_kv_lens: the same on the host.
    * q_lens: rows of each sequence, which are consecutive. Empty: each has one. Row j of n sees the
      first kv_len − (n − 1 − j) tokens.
    * tree: [rows] int64 if rows are nodes of a tree of drafts, else None. A row then sees token t
      of kv_len if t < kv_len − 64, or if bit t − (kv_len − 64) of its number is set.
    """

    page_table: Tensor
    kv_lens: Tensor
    host_kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] = ()
    tree: Tensor | None = None

    @property
    def size(self) -> int:
        """The number of sequences."""
        return len(self.host_kv_lens)

    @property
    def rows(self) -> int:
        """The number of rows of all sequences."""
        return sum(self.q_lens) if self.q_lens else len(self.host_kv_lens)


class RowOwners:
    """The sequence of each row of a DecodePart, and the number of its rows that follow. A kernel
    keeps one in its state. The same q_lens, as a captured step sees them, are sent to `device`
    once.
    """

    def __init__(self, device: Any) -> None:
        self._device = torch.device(device)
        self._made: tuple[tuple[int, ...], Tensor, Tensor] | None = None

    def of(self, q_lens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Returns (sequence, rows that follow) of every row, both [rows] int32 on the device."""
        if self._made is None or self._made[0] != q_lens:
            rows = sum(q_lens)
            both = np.zeros((2, -(-rows // _ALIGNED) * _ALIGNED), np.int32)
            both[0, :rows] = np.repeat(np.arange(len(q_lens)), q_lens)
            both[1, :rows] = np.repeat(np.cumsum(q_lens), q_lens) - 1 - np.arange(rows)
            there = torch.from_numpy(both)
            if self._device.type != "cpu":  # the copy then waits for nothing
                there = there.pin_memory().to(self._device, non_blocking=True)
            self._made = q_lens, there[0, :rows], there[1, :rows]
        return self._made[1:]


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """Cached tokens of consecutive prefill sequences: a range of each.

    * starts: [sequences] int64, the first token of each range.
    * segs: the lengths of the ranges.
    * page_table, q_segs: those of these sequences alone, as in PrefillPart.
    * sequence, row: the first of these sequences and of their new rows, counted in the PrefillPart.
    * adapters: of each cached token, as in Batch.
    """

    starts: Tensor
    segs: Segments
    page_table: Tensor
    q_segs: Segments
    sequence: int = 0
    row: int = 0
    adapters: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Rows [decode.rows, tokens) of the batch: sequences with several new tokens, in order.

    * q_segs: new tokens of each sequence.
    * page_table: [sequences, max_pages] int32.
    * prefix: cached tokens before the new ones, in chunks that bound the memory of their expansion.
      Empty if no sequence has any.
    """

    q_segs: Segments
    page_table: Tensor
    prefix: tuple[PrefixChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How a step's rows lie on groups of ranks that divide attention by sequences.

    A rank's batch holds the rows of its group's sequences. What is divided by width takes the rows
    of all groups: each one's, filled up to `rows`, one group after the other. real: [all rows]
    int64, which of these places hold a row; None if all do. wanted: logit rows of each group,
    filled up. order: [logit rows] int64, the place among these of every logit row of the step, in
    the order of its works. None if they lie so. adapters and logit_adapters: as in Batch, of all
    real rows and of all logit rows. None if no row has one.
    """

    rows: int
    wanted: int
    real: Tensor | None = None
    order: Tensor | None = None
    adapters: Tensor | None = None
    logit_adapters: Tensor | None = None


@dataclass(slots=True)
class Batch:
    """One step. Decode rows come first, then prefill rows, sequence by sequence.

    * input_ids, positions, slots: [tokens] int64. A negative slot is padding.
    * logit_rows: [rows] int64, the rows whose logits are wanted, rising.
    * decode, prefill: the two parts, None if a step lacks one.
    * states: the state of each stateful kernel, by its key.
    * adapters: [tokens] int32, each row's slot of low-rank adapters, −1 for none. None if no row
      has one.
    * order: how rows lie, for the exchange that made it. Where attention is divided by sequences, a
      rank may have no row at all.
    * index_keys: of trees with sparse attention, what each indexer made a key of.
    * blocks: [sequences] int64, each sequence's block of state groups, decoding ones first. None
      without such groups. At position 0 nothing in the block counts.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    decode: DecodePart | None = None
    prefill: PrefillPart | None = None
    states: dict[str, Any] = field(default_factory=dict)
    adapters: Tensor | None = None
    order: RowOrder | None = None
    index_keys: list[Tensor] = field(default_factory=list)
    blocks: Tensor | None = None

    @property
    def num_decode(self) -> int:
        """Rows of decoding sequences."""
        return self.decode.rows if self.decode is not None else 0

    @property
    def num_tokens(self) -> int:
        """Rows of the batch, padding among them."""
        return int(self.input_ids.shape[0])
