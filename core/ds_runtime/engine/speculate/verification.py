"""Steps that draft and verify, captured: of each size the model's forward over the last tokens and
their drafts. What follows it is in `chain.py` and `tree_phases.py`: the draft layer's run over the
same tokens, and its runs behind them.

Between the first two the model's draws say which drafts were right; how many these are the host
must know before the third, because keys have other places then. Spare rows and sequences are as in
`engine/capture/decode.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.capture.decode import (
    GraphContext,
    PageTable,
    captured,
    decode_step,
    prepare_kernels,
)
from ds_runtime.engine.speculate.tree import Trees, seen_by
from ds_runtime.engine.step.finite import finite_rows
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.sampler import Sampler
from ds_runtime.engine.step.transfer import Array, Buffer, Upload
from ds_runtime.model.deepseek import DeepSeekModel
from ds_runtime.model.draft import DraftModel
from ds_runtime.ops.batch import Batch, DecodePart, Limits
from ds_runtime.platform.contract import GraphBackend


@dataclass(frozen=True, slots=True)
class CyclePlace:
    """What all captured cycles of a runner share.

    hidden: [rows, hidden], logits [rows, vocab] and finite [rows] bool, whether rows of these are
    numbers, of the largest verification; tail, tail_logits:
    the same of the draft layer, a row per sequence. trees: how drafts hang together, if not as
    chains. tables: by size, [size, pages]: a verification fills in what the drafting behind it
    reads.
    """

    base: GraphContext
    model: DeepSeekModel
    draft: DraftModel
    sampler: Sampler
    layers: list[Tensor]
    draft_caches: Sequence[Tensor]
    shape: Speculation
    trees: Trees | None
    hidden: Tensor
    logits: Tensor
    finite: Tensor
    tail: Tensor
    tail_logits: Tensor
    tables: dict[int, PageTable] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Tokens per row of last_tokens."""
        return self.shape.tokens

    @property
    def pages(self) -> int:
        """Columns of a table: behind a sequence that fills its context, spare tokens of a
        verification stand in a page of their own.
        """
        limits = self.base.limits
        return limits.max_pages_per_sequence + -(-(self.width - 1) // limits.page_size)

    def limits(self, size: int, queries: int) -> Limits:
        return replace(
            self.base.limits,
            max_tokens=size * queries,
            max_sequences=size,
            max_pages_per_sequence=self.pages,
            max_queries=queries,
        )

    def table(self, size: int) -> PageTable:
        """That of a size."""
        if size not in self.tables:
            base = self.base
            self.tables[size] = PageTable(size, self.pages, base.spare_page, base.device)
        return self.tables[size]


class Numbers(NamedTuple):
    """A step's arrays, by their numbers in an upload. All but the table have places. counts: of
    trees, per row the nodes of its sequence, 0 for a spare row.
    """

    places: int
    positions: int
    slots: int
    kv_lens: int
    counts: int | None
    adapters: int | None
    table: int | None


class Rows:
    """The inputs of `size` sequences with `queries` tokens each, at places that never move. trees:
    how these hang together, if not as chains.
    """

    def __init__(
        self, place: CyclePlace, size: int, queries: int, trees: Trees | None = None
    ) -> None:
        self.size, self.queries = size, queries
        self._place, self._trees = place, trees
        base, rows = place.base, size * queries
        bounds = place.limits(size, queries)
        self.states = {key: kernel.state(bounds) for key, kernel in base.stateful.items()}
        self._table = place.table(size)
        room = rows * 256 + size * (256 + 4 * base.limits.max_pages_per_sequence) + (1 << 13)
        self.buffer = Buffer(room, base.device)
        self._every = torch.arange(rows, device=base.device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=base.device)  # of trees
        self._seen = torch.full((rows,), -1, dtype=torch.int64, device=base.device)
        # A step of spare rows alone: places, positions, slots and counts; then the lengths.
        spare = base.last_tokens.shape[0] - place.width
        self._blank = np.zeros((4, size, queries), np.int64)
        self._blank[0], self._blank[2] = spare, -1
        self._blank_lens = np.full(size, queries if trees is None else 1, np.int32)
        self._along, self._sequences = np.arange(queries), np.arange(size)[:, None]

    def add(self, works: Sequence[Work], upload: Upload) -> Numbers:
        """A step's inputs, filled up: the first arrays of its upload. A work with fewer tokens has
        spare ones behind them, which nothing that counts sees.
        """
        base, tree, count = self._place.base, self._trees is not None, len(works)
        table = self._table.held([w.pages for w in works])
        found, kv_lens = self._blank.copy(), self._blank_lens.copy()
        if works:
            size, along = base.limits.page_size, self._along
            about = np.array([(w.row, w.start, w.length) for w in works], np.int64)
            rows, starts, lengths = about.T[:, :, None]  # [works, 1] each
            places, positions, slots, counts = found[:, :count]
            real = along < lengths
            at = starts + along * real
            page, offset = np.divmod(at, size)
            own = table[self._sequences[:count], page].astype(np.int64)
            places[:] = rows * self._place.width + along
            slots[:] = np.where(real, own * size + offset, -1)
            positions[:] = starts if tree else at
            lengths = np.minimum(lengths, self.queries)
            counts[:] = lengths * real
            kv_lens[:count] = (starts + (lengths if tree else self.queries))[:, 0]
        adapters = None
        if base.adapts:
            held = np.full((self.size, self.queries), -1, np.int32)
            held[:count] = np.array([w.adapter for w in works], np.int32)[:, None]
            adapters = held.reshape(-1)
        places, positions, slots, counts = found.reshape(4, -1)
        return Numbers(
            places=upload.add(places),
            positions=upload.add(positions),
            slots=upload.add(slots),
            kv_lens=upload.add(kv_lens),
            counts=upload.add(counts) if tree else None,
            adapters=None if adapters is None else upload.add(adapters),
            table=self._table.add(table, upload),
        )

    def prepare(self, works: Sequence[Work], sent: Upload, numbers: Numbers) -> Batch:
        """The batch of a step whose upload has been sent to `buffer`."""
        queries = self.queries
        self._table.take(sent, numbers.table)
        spare = self.size - len(works)
        positions, seen = sent[numbers.positions], None
        if numbers.counts is None:
            lens = (*(w.start + queries for w in works), *((queries,) * spare))
        else:
            lens = (*(w.start + min(w.length, queries) for w in works), *((1,) * spare))
            positions, seen = self._hang(sent[numbers.places], positions, sent[numbers.counts])
        batch = Batch(
            input_ids=sent[numbers.places],
            positions=positions,
            slots=sent[numbers.slots],
            logit_rows=self._every,
            decode=DecodePart(
                self._table.tensor,
                sent[numbers.kv_lens],
                lens,
                (queries,) * self.size if queries > 1 else (),
                seen,
            ),
            states=self.states,
            adapters=None if numbers.adapters is None else sent[numbers.adapters],
        )
        prepare_kernels(self._place.base.stateful, self.states, batch)
        return batch

    def _hang(self, places: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the nodes of trees, and what they see; spare rows see all there is."""
        assert self._trees is not None
        real = counts > 0
        depths, lines = self._trees.depths[places], self._trees.lines[places]
        self._positions.copy_(starts + torch.where(real, depths, 0))
        self._seen.copy_(torch.where(real, seen_by(lines, counts), -1))
        return self._positions, self._seen


class VerifyGraph(Rows):
    """`size` sequences with `queries` tokens each: `hidden`, `logits` and `finite` of the place
    receive the model's results.
    """

    def __init__(self, place: CyclePlace, size: int, queries: int) -> None:
        super().__init__(place, size, queries, place.trees if queries > 1 else None)
        # of what a step's draws need, sent apart: see Runner._replay_cycle
        self.behind = Buffer(size * (queries + 1) * 256 + (1 << 13), place.base.device)
        self.batch: Batch | None = None  # that was captured
        self._places: Tensor | None = None
        self._replay: Callable[[], None] | None = None

    def capture(self, backend: GraphBackend) -> None:
        """Run the forward over spare rows alone, then record it."""
        place, base = self._place, self._place.base
        sent = Upload(base.device)
        numbers = self.add((), sent)
        sent.send(self.buffer)
        batch = self.batch = self.prepare((), sent, numbers)
        places, rows = batch.input_ids, self.size * self.queries
        self._places = places
        assert batch.decode is not None
        keys = place.model.state_keys(batch.decode)

        def run() -> None:
            prepare_kernels(base.stateful, self.states, batch, keys)
            batch.input_ids = base.last_tokens.index_select(0, places)
            batch.index_keys.clear()
            hidden = place.model.forward(batch, place.layers, every=True)
            place.hidden[:rows].copy_(hidden)
            place.model.logits(hidden, place.logits[:rows], batch.adapters)
            place.finite[:rows].copy_(finite_rows(place.logits[:rows]))

        self._replay = captured(run, backend, decode_step(self.size))

    def verify(self, works: Sequence[Work], sent: Upload, numbers: Numbers) -> Tensor:
        """Logits [size · queries, vocab] of a step whose upload has been sent to `buffer`."""
        assert self._replay is not None, "replayed before it was captured"
        self.prepare(works, sent, numbers)
        self._replay()
        return self._place.logits[: self.size * self.queries]

    @property
    def finite(self) -> Tensor:
        """Whether rows of the logits are numbers, until the next verification of any size."""
        return self._place.finite[: self.size * self.queries]

    @property
    def inputs(self) -> Tensor:
        """Where each row's token lies in last_tokens: [size · queries] int64."""
        assert self._places is not None, "asked before it was captured"
        return self._places

    def lies(self, works: Sequence[Work]) -> Array:
        """The row of each draw: [draws] int64."""
        return _lies(tuple(w.length for w in works), self.queries)


@lru_cache(maxsize=256)  # nobody writes to it
def _lies(lengths: tuple[int, ...], queries: int) -> Array:
    return np.array([i * queries + j for i, n in enumerate(lengths) for j in range(n)], np.int64)
