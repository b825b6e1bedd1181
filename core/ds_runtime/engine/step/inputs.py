"""The tensors of one step, of whatever kind: works → rows, page tables and lengths → a Batch.

Host arrays in numpy, then one transfer for all of them. A step op by op has the rows that its works
have. A captured one has a `Frame`: this many sequences of this many tokens, whose places that no
work takes are filled with dummies, which write nothing and belong to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack_into
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.prompts import Prompts
from ds_runtime.engine.step.transfer import PageTable, Table, Upload, padded
from ds_runtime.ops.batch import Batch, DecodePart, RowOrder
from ds_runtime.parallel.row_order import adapters_of

Ints = npt.NDArray[np.int64]


class Hanging(Protocol):
    """Drafts that branch, on the device."""

    def hang(self, places: Tensor, starts: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of nodes, and what they see: [rows] each. places: theirs in last_tokens;
        starts: the root's positions; nodes: how many their sequences have, 0 for dummies, which see
        all.
        """


class DraftRun(NamedTuple):
    """What a run of the draft layer behind a step has of each sequence instead of the work's own
    tokens: `tokens` from `starts` on. Where a sequence has no page left, nothing is written.

    positions: at which all tokens of a sequence are, if not one after the other. lens: its
    tokens with these; where these are not among them, none is written.
    """

    starts: Sequence[int]
    tokens: int = 1
    positions: Sequence[int] | None = None
    lens: Sequence[int] | None = None


class Rows(NamedTuple):
    """Per token its id, or its place in last_tokens; its position and slot; the nodes of its
    sequence, where these branch, 0 for a dummy. lens: tokens of each decoding sequence with
    these; q_lens: its rows, empty if one each. owners: whose pages a row reads, where each is a
    sequence of its own.
    """

    ids: Ints
    positions: Ints
    slots: Ints
    nodes: Ints
    lens: list[int]
    q_lens: tuple[int, ...] = ()
    owners: Ints | None = None


class Frame:
    """Places that never move, for `size` sequences of `queries` tokens each.

    states: of the kernels. table: shared by frames of one size. adapts: rows may have adapters.
    Where drafts branch, positions and seen, [rows] int64, are made on the
    device. each: the page table of every row, [rows, pages], where each is a sequence of its own.
    """

    def __init__(
        self, size: int, queries: int, table: PageTable, states: dict[str, Any], adapts: bool
    ) -> None:
        self.size, self.queries, self.rows = size, queries, size * queries
        self.table, self.states, self.adapts = table, states, adapts
        device = table.tensor.device
        self.every = torch.arange(self.rows, device=device)
        self.positions = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self.seen = torch.full((self.rows,), -1, dtype=torch.int64, device=device)
        self.each: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Makes the batches of one rank.

    last_tokens: [rows · width] int64 on the device, per row the token sampled last and the drafts
    after it; decode works read them there. The last row is nobody's: that of dummies. pages: most
    of a sequence; context: most tokens of it. prefix_chunk: most cached tokens that one PrefixChunk
    covers, over all its sequences. stateful: requests keep more than pages, in their rows' blocks.
    alone: every row, of prompts too, attends the cache as a sequence of its own.
    """

    page_size: int
    pages: int
    context: int
    last_tokens: Tensor
    prefix_chunk: int
    width: int = 1
    stateful: bool = False
    alone: bool = False

    def add(
        self,
        works: Sequence[Work],
        upload: Upload,
        frame: Frame | None = None,
        branched: Hanging | None = None,
        run: DraftRun | None = None,
    ) -> Added:
        """Add a step's arrays to its upload. frame: fill them up for a captured step. branched:
        how the drafts of each row hang together; None: as chains. Logit rows are in the order of
        the works, `logit_rows` of each; in a frame all are.
        """
        drawn = count = len(works)
        if run is None:
            drawn = next((i for i, w in enumerate(works) if w.tokens is not None), drawn)
            count = next((i for i, w in enumerate(works) if not w.as_decode), count)
        rows, table = self._rows(works, (drawn, count), frame, branched, run)
        added = Added(
            rows,
            frame,
            branched if rows.q_lens else None,
            numbers=[upload.add(a) for a in (rows.ids, rows.positions, rows.slots)],
            lens=upload.add(np.array(rows.lens, np.int32)),
        )
        if rows.owners is not None:
            added.owners, count = upload.add(rows.owners), len(works)
        decodes, prefills = works[:count], works[count:]
        if added.branched is not None:
            added.nodes = upload.add(rows.nodes)
        if self.stateful:
            dummies = 0 if frame is None else frame.size - len(works)
            blocks = [w.row for w in works] + [self._spare // self.width] * dummies
            added.blocks = upload.add(np.array(blocks, np.int64))
        if frame is None and run is None:
            one = rows.nodes is _NONE
            wanted = np.arange(len(works), dtype=np.int64) if one else _logit_rows(works)
            added.logit_rows = upload.add(wanted)
        adapts = run is None and any(w.adapter >= 0 for w in works)
        if adapts if frame is None else frame.adapts:
            added.adapters = upload.add(_row_adapters(works, frame))
        if frame is None and decodes:
            needed = -(-max(rows.lens) // self.page_size)
            added.table = upload.add(self._checked(table[:count, :needed]))
        elif frame is not None and run is None:  # else it is there
            added.table = frame.table.add(table, upload)  # the last, as all others have places
        if prefills:
            added.prompts = self.prompts(prefills, table[count:], adapts, upload)
        return added

    def prompts(self, works: Sequence[Work], table: Table, adapts: bool, upload: Upload) -> Prompts:
        """Add the arrays of prompts to an upload. table: whose first rows are their pages, and may
        have more of them than they need. adapts: rows have adapters."""
        needed = max(-(-(w.start + w.length) // self.page_size) for w in works)
        pages = self._checked(table[: len(works), :needed])
        return Prompts.of(works, pages, self.prefix_chunk, adapts, upload)

    def _checked(self, table: Table) -> Table:
        width = table.shape[1]
        assert width <= self.pages, f"a sequence has {width} pages, the limit is {self.pages}"
        return table

    def _rows(
        self,
        works: Sequence[Work],
        counts: tuple[int, int],
        frame: Frame | None,
        branched: Hanging | None,
        run: DraftRun | None,
    ) -> tuple[Rows, Table]:
        """And the pages of all works: [works or the frame's size, most]. counts: of the works whose
        tokens were drawn, which come first, and of those that attend as decode does."""
        lists = [w.pages for w in works]
        table = padded(lists) if frame is None else frame.table.held(lists)
        if frame is not None:
            one = frame.queries == 1
        elif run is not None:
            one = run.tokens == 1
        else:
            one = counts[0] == len(works) and all(w.length == 1 for w in works)
        if one:
            return self._single(works, len(works) if frame is None else frame.size, run), table
        return self._several(works, counts, table, frame, branched, run), table

    def _single(self, works: Sequence[Work], size: int, run: DraftRun | None) -> Rows:
        """One token each: most steps, and a few numbers, for which numpy's calls are slow."""
        n, width, spare, dummies = self.page_size, self.width, self._spare, size - len(works)
        pages = [w.pages for w in works]
        starts = [w.start for w in works] if run is None else list(run.starts)
        at = (
            starts
            if run is None
            else [min(t, self._last(p)) for t, p in zip(starts, pages, strict=True)]
        )
        slots = [p[t // n] * n + t % n for p, t in zip(pages, at, strict=True)]
        if run is not None:
            slots = [s if a == t else -1 for s, a, t in zip(slots, at, starts, strict=True)]
        return Rows(
            np.array([w.row * width for w in works] + [spare] * dummies, np.int64),
            np.array(at + [0] * dummies, np.int64),
            np.array(slots + [-1] * dummies, np.int64),
            _NONE,
            [t + 1 for t in at] + [1] * dummies,
        )

    @property
    def _spare(self) -> int:
        """The place of dummies in last_tokens."""
        return self.last_tokens.shape[0] - self.width

    def _last(self, pages: Sequence[int]) -> int:
        """The last position for which a sequence has a page."""
        return min(len(pages) * self.page_size, self.context) - 1

    def _several(
        self,
        works: Sequence[Work],
        counts: tuple[int, int],
        table: Table,
        frame: Frame | None,
        branched: Hanging | None,
        run: DraftRun | None,
    ) -> Rows:
        """Any number of tokens each. In a frame, and in runs, every sequence has as many: those
        that a work does not have stand at its first position, and nothing that counts sees them.
        """
        n, queries = len(works), 0 if frame is None else frame.queries
        drawn, num_decode = counts
        about = np.array([(w.row * self.width, w.start, w.length) for w in works], np.int64)
        about = about.reshape(-1, 3)
        if run is not None:
            queries, about[:, 1], about[:, 2] = run.tokens, run.starts, run.tokens
        if queries:
            first, start, length = about.T[:, :, None]
            owner, along = np.arange(n)[:, None], np.arange(queries)
        else:
            lengths = about[:, 2]
            first, start, length = about.T.repeat(lengths, axis=1)
            owner, behind = np.arange(n).repeat(lengths), np.cumsum(lengths) - lengths
            along = np.arange(len(owner)) - behind[owner]
        real = along < length
        at = start + along * real
        page, offset = np.divmod(at, self.page_size)
        if run is not None:
            room = np.array([self._last(w.pages) for w in works], np.int64)[:, None]
            real, page = at <= room, np.minimum(page, room // self.page_size)
            if run.lens is not None and run.positions is not None:
                real = real & (np.array(run.lens) >= about[:, 1] + run.tokens)[:, None]
                at = np.array(run.positions, np.int64)[:, None] + 0 * along
        slots = np.where(real, table[owner, page].astype(np.int64) * self.page_size + offset, -1)
        if branched is not None:  # the device knows how deep a node is
            at = np.where(owner < drawn, start, at)
        nodes = np.minimum(length, queries or length) * real
        rows = np.stack(np.broadcast_arrays(first + along, at, slots, nodes))
        if not queries:
            ids, positions, slots, nodes = rows
            ids = _with_prompts(ids, works[drawn:])
            if self.alone:
                return Rows(ids, positions, slots, nodes, (at + 1).tolist(), owners=owner)
            lens = [w.start + w.length for w in works[:num_decode]]
            several = any(w.length > 1 for w in works[:num_decode])
            q_lens = tuple(w.length for w in works[:num_decode]) if several else ()
            return Rows(ids, positions, slots, nodes, lens, q_lens)
        size = n if frame is None else frame.size
        filled = np.zeros((4, size, queries), np.int64)
        filled[0, n:], filled[2, n:] = self._spare, -1
        filled[:, :n] = rows
        ids, positions, slots, nodes = filled.reshape(4, -1)
        if self.alone:
            owners = np.arange(size).repeat(queries)
            return Rows(ids, positions, slots, nodes, (positions + 1).tolist(), owners=owners)
        ends = np.full(size, queries if branched is None and run is None else 1)
        if run is not None and run.lens is not None:
            ends[:n] = run.lens
        else:
            ends[:n] = about[:, 1] + (queries if branched is None else nodes[::queries][:n])
        return Rows(ids, positions, slots, nodes, ends.tolist(), (queries,) * size)


_NONE = np.zeros(0, np.int64)


def _with_prompts(places: Ints, prefills: Sequence[Work]) -> Ints:
    """[tokens]: places in last_tokens for decode works, then the token ids of the others."""
    at = places.nbytes - sum(w.length for w in prefills) * places.itemsize
    for work in prefills:
        assert work.tokens is not None, "decode works come first"
        pack_into(f"{work.length}q", places.data, at, *work.tokens)
        at += work.length * places.itemsize  # numpy itself reads ints half as fast
    return places


def _logit_rows(works: Sequence[Work]) -> Ints:
    rows, total = list[int](), 0
    for work in works:
        total += work.length
        rows += range(total - work.logit_rows, total)
    return np.array(rows, np.int64)


def _row_adapters(works: Sequence[Work], frame: Frame | None) -> npt.NDArray[np.int32]:
    """[rows] int32: the adapter of every row."""
    if frame is None:
        return adapters_of(works, [w.length for w in works])
    found = np.full((frame.size, frame.queries), -1, np.int32)
    found[: len(works)] = np.array([w.adapter for w in works], np.int32)[:, None]
    return found.reshape(-1)


@dataclass(slots=True)
class Added:
    """A step's arrays by their numbers in an upload. Once that is sent, `batch` makes the step."""

    rows: Rows
    frame: Frame | None
    branched: Hanging | None
    numbers: list[int]
    lens: int
    table: int | None = None
    owners: int | None = None
    nodes: int | None = None
    logit_rows: int | None = None
    adapters: int | None = None
    blocks: int | None = None
    prompts: Prompts | None = None

    def batch(self, sent: Upload, states: dict[str, Any], seen: Tensor | None = None) -> Batch:
        """The step, over places that never move if it has a frame. Ids are still places in
        last_tokens, of decode works: see `read_last_tokens`. seen: what rows see, if not what
        `branched` says.
        """
        ids, positions, slots = (sent[number] for number in self.numbers)
        frame, rows, table = self.frame, self.rows, None
        if self.branched is not None:
            assert self.nodes is not None
            positions, seen = self._hang(self.branched, ids, positions, sent[self.nodes])
        if frame is not None:
            frame.table.take(sent, self.table)
            table, logit_rows = frame.table.tensor, frame.every
        else:
            if self.table is not None:
                table = sent[self.table]
            logit_rows = positions if self.logit_rows is None else sent[self.logit_rows]
        batch = Batch(
            input_ids=ids,
            positions=positions,
            slots=slots,
            logit_rows=logit_rows,
            states=states,
            adapters=None if self.adapters is None else sent[self.adapters],
            blocks=None if self.blocks is None else sent[self.blocks],
        )
        if table is not None and self.owners is not None:
            table = table.index_select(0, sent[self.owners])
            if frame is not None:
                frame.each = table = table if frame.each is None else frame.each.copy_(table)
        if table is not None and rows.lens:
            batch.decode = DecodePart(table, sent[self.lens], tuple(rows.lens), rows.q_lens, seen)
        if self.prompts is not None:
            batch.prefill = self.prompts.sent(sent)
        return batch

    def _hang(
        self, branched: Hanging, ids: Tensor, starts: Tensor, nodes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Positions of all rows, of which the first are nodes of branched, and what these see."""
        count = sum(self.rows.q_lens)
        positions, seen = branched.hang(ids[:count], starts[:count], nodes[:count])
        if self.frame is None:
            return torch.cat((positions, starts[count:])), seen
        return self.frame.positions.copy_(positions), self.frame.seen.copy_(seen)


def read_last_tokens(batch: Batch, last_tokens: Tensor, count: int) -> None:
    """Put the tokens of decode works, the first `count` rows, where their places are."""
    places = batch.input_ids
    if count == places.shape[0]:
        batch.input_ids = last_tokens.index_select(0, places)
    elif count:
        own = last_tokens.index_select(0, places[:count])
        batch.input_ids = torch.cat((own, places[count:]))


def bare_batch(
    ids: Tensor, positions: Tensor, slots: Tensor, adapters: Tensor | None, order: RowOrder | None
) -> Batch:
    """Rows of which nobody asks whose they are: a step with prompts but for its attention. All of
    them are wanted.
    """
    return Batch(ids, positions, slots, ids[:0], adapters=adapters, order=order)
