"""Steps that draft and verify, captured: of each size the model's forward over the last tokens and
their drafts, the draft layer's run over the same tokens, and its runs behind them. Those behind
trees are in `engine/tree_cycle.py`.

Between the first two the model's draws say which drafts were right; how many these are the host
must know before the third, because keys have other places then. Spare rows and sequences are as in
`engine/graphs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_runtime.engine.graphs import PageTable, Place, captured, decode_step, prepare_kernels
from ds_runtime.engine.sampler import Draw, Sampler
from ds_runtime.engine.step import Work
from ds_runtime.engine.transfer import Buffer, Upload
from ds_runtime.engine.tree import Trees, seen_by
from ds_runtime.engine.verify import Branch
from ds_runtime.model.deepseek import DeepSeekModel
from ds_runtime.model.draft import DraftModel
from ds_runtime.ops.batch import Batch, DecodePart, Limits
from ds_runtime.platform.spec import GraphBackend
from ds_runtime.speculation import Speculation


@dataclass(frozen=True, slots=True)
class CyclePlace:
    """What all captured cycles of a runner share.

    hidden: [rows, hidden] and logits [rows, vocab] of the largest verification; tail, tail_logits:
    the same of the draft layer, a row per sequence. trees: how drafts hang together, if not as
    chains. tables: by size, [size, pages]: a verification fills in what the drafting behind it
    reads.
    """

    base: Place
    model: DeepSeekModel
    draft: DraftModel
    sampler: Sampler
    layers: list[Tensor]
    draft_caches: Sequence[Tensor]
    shape: Speculation
    trees: Trees | None
    hidden: Tensor
    logits: Tensor
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


def _tables(
    works: Sequence[Work], size: int, spare: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """All pages of every work, filled up with its first: [size, most] int32."""
    lens = np.array([len(w.pages) for w in works], np.int64)
    found = np.full((size, int(lens.max(initial=1))), spare, np.int32)
    if works:
        flat = np.array([*chain.from_iterable(w.pages for w in works)], np.int32)
        own = found[: len(works)]
        own[:] = flat[np.cumsum(lens) - lens, None]
        own[np.arange(own.shape[1]) < lens[:, None]] = flat
    return found


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
        self._states = {key: kernel.state(bounds) for key, kernel in base.stateful.items()}
        self._table = place.table(size)
        room = rows * 256 + size * (256 + 4 * base.limits.max_pages_per_sequence) + (1 << 13)
        self.buffer = Buffer(room, base.device)
        self._every = torch.arange(rows, device=base.device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=base.device)  # of trees
        self._seen = torch.full((rows,), -1, dtype=torch.int64, device=base.device)

    def add(self, works: Sequence[Work], upload: Upload) -> Numbers:
        """A step's inputs, filled up: the first arrays of its upload. A work with fewer tokens has
        spare ones behind them, which nothing that counts sees.
        """
        place, base, queries = self._place, self._place.base, self.queries
        size, page = base.limits.page_size, np.arange(queries)
        shape = (self.size, queries)
        spare = base.last_tokens.shape[0] - place.width
        places, positions = np.full(shape, spare, np.int64), np.zeros(shape, np.int64)
        tree, counts = self._trees is not None, np.zeros(shape, np.int64)
        slots = np.full(shape, -1, np.int64)
        kv_lens = np.full(self.size, 1 if tree else queries, np.int32)
        table, count = _tables(works, self.size, base.spare_page), len(works)
        if works:
            starts = np.array([w.start for w in works], np.int64)
            lengths = np.array([min(w.length, queries) for w in works], np.int64)
            places[:count] = (
                np.array([w.row for w in works], np.int64)[:, None] * place.width + page
            )
            real = page < lengths[:, None]
            at = starts[:, None] + np.where(real, page, 0)
            pages = np.take_along_axis(table[:count], at // size, 1)
            slots[:count] = np.where(real, pages.astype(np.int64) * size + at % size, -1)
            positions[:count] = starts[:, None] if tree else at
            counts[:count] = np.where(real, lengths[:, None], 0)
            kv_lens[:count] = starts + (lengths if tree else queries)
        adapters = None
        if base.adapts:
            held = np.full(shape, -1, np.int32)
            held[:count] = np.array([w.adapter for w in works], np.int32)[:, None]
            adapters = held.reshape(-1)
        return Numbers(
            places=upload.add(places.reshape(-1)),
            positions=upload.add(positions.reshape(-1)),
            slots=upload.add(slots.reshape(-1)),
            kv_lens=upload.add(kv_lens),
            counts=upload.add(counts.reshape(-1)) if tree else None,
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
            states=self._states,
            adapters=None if numbers.adapters is None else sent[numbers.adapters],
        )
        prepare_kernels(self._place.base.stateful, self._states, batch)
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
    """`size` sequences with `queries` tokens each: `hidden` and `logits` of the place receive the
    model's results, and behind chains `tail` and `tail_logits` the draft layer's at the last kept
    token.
    """

    def __init__(self, place: CyclePlace, size: int, queries: int) -> None:
        super().__init__(place, size, queries, place.trees if queries > 1 else None)
        device = place.base.device
        # of what a step's draws need, sent apart: see Runner._replay_cycle
        self.behind = Buffer(size * (queries + 1) * 256 + (1 << 13), device)
        self._ids = torch.zeros(size * queries, dtype=torch.int64, device=device)
        self._last = torch.zeros(size, dtype=torch.int64, device=device)
        self._firsts = torch.arange(0, size * queries, queries, device=device)
        self.batch: Batch | None = None  # that was captured
        self._verify: Callable[[], None] | None = None
        self._follow: Callable[[], None] | None = None

    def capture(self, backend: GraphBackend) -> None:
        """Run both forwards over spare rows alone, then record them."""
        place, base = self._place, self._place.base
        sent = Upload(base.device)
        numbers = self.add((), sent)
        sent.send(self.buffer)
        batch = self.batch = self.prepare((), sent, numbers)
        places, rows = batch.input_ids, self.size * self.queries
        assert batch.decode is not None
        keys = place.model.state_keys(batch.decode)
        others = place.draft.state_keys(batch.decode) - keys

        def verify() -> None:
            prepare_kernels(base.stateful, self._states, batch, keys)
            batch.input_ids = base.last_tokens.index_select(0, places)
            batch.index_keys.clear()
            hidden = place.model.forward(batch, place.layers, every=True)
            place.hidden[:rows].copy_(hidden)
            place.model.logits(hidden, place.logits[:rows], batch.adapters)

        def follow() -> None:
            prepare_kernels(base.stateful, self._states, batch, others)
            hidden = place.hidden[:rows]
            tail = place.draft.forward(batch, hidden, self._ids, place.draft_caches, self._last)
            place.tail[: self.size].copy_(tail)
            place.draft.logits(tail, place.tail_logits[: self.size])

        self._verify = captured(verify, backend, decode_step(self.size))
        if place.trees is None:
            self._follow = captured(follow, backend, decode_step(self.size))

    def verify(self, works: Sequence[Work], sent: Upload, numbers: Numbers) -> Tensor:
        """Logits [size · queries, vocab] of a step whose upload has been sent to `buffer`."""
        assert self._verify is not None, "replayed before it was captured"
        self.prepare(works, sent, numbers)
        self._verify()
        return self._place.logits[: self.size * self.queries]

    def follow(self, tokens: Tensor, branch: Branch, rows: Tensor) -> None:
        """The draft layer's run behind `verify`. tokens: [draws] of the model; rows: [draws] where
        each was drawn.
        """
        assert self._follow is not None, "replayed before it was captured"
        count = branch.accepted.shape[0]
        self._ids.index_copy_(0, rows, tokens)
        torch.add(self._firsts[:count], branch.accepted, out=self._last[:count])
        self._follow()


class ChainGraph:
    """`drafts` drafts of `size` sequences, from `tail_logits` on, into their rows' places."""

    def __init__(self, place: CyclePlace, size: int, drafts: int) -> None:
        self.size, self.drafts = size, drafts
        self._place = place
        base, key = place.base, place.draft.state_key
        self._kernels = {key: base.stateful[key]} if key else {}  # none where attention is sparse
        bounds = place.limits(size, 1)
        self._states = [
            {key: kernel.state(bounds) for key, kernel in self._kernels.items()}
            for _ in range(drafts - 1)
        ]
        self._table = place.table(size)
        room = size * (drafts * 64 + 128) + (1 << 10) * (drafts + 1)
        self._buffer = Buffer(room, base.device)
        self._replay: Callable[[], None] | None = None

    def _send(
        self, works: Sequence[Work], ends: Sequence[int]
    ) -> tuple[Tensor, list[Batch], list[tuple[Tensor, ...]]]:
        """Rows, the batch of each run and the settings of each draw, at their places. The table is
        there: the step has verified these works.
        """
        place, base, count = self._place, self._place.base, len(works)
        sampler, size = place.sampler, base.limits.page_size
        sent = Upload(base.device)
        rows = np.full(self.size, base.last_tokens.shape[0] // place.width - 1, np.int64)
        rows[:count] = [w.row for w in works]
        most = base.limits.max_pages_per_sequence * size
        room = np.array([min(len(w.pages) * size, most) for w in works], np.int64)
        numbers, lens = [], []
        for step in range(1, self.drafts):
            at, slots = np.zeros(self.size, np.int64), np.full(self.size, -1, np.int64)
            if works:
                want = np.array(ends, np.int64) + step
                at[:count] = np.minimum(want, room - 1)
                places = (at[:count] // size).tolist()
                pages = [w.pages[p] for w, p in zip(works, places, strict=True)]
                own = np.array(pages, np.int64) * size + at[:count] % size
                slots[:count] = np.where(at[:count] == want, own, -1)
            kv_lens = (at + 1).astype(np.int32)
            lens.append(tuple(kv_lens.tolist()))
            numbers.append([sent.add(a) for a in (at, slots, kv_lens)])
        settings = []
        drawn = any(sampler.row(w.row).params.temperature > 0.0 for w in works)  # else greedy
        for step in range(self.drafts):
            pairs = zip(works, ends, strict=True) if drawn else ()
            draws = [Draw(w.row, e + 2 + step) for w, e in pairs]
            settings.append([sent.add(a) for a in sampler.settings(draws, self.size)])
        own_rows = sent.add(rows)
        sent.send(self._buffer)
        batches = []
        for (at_, slots_, lens_), host, states in zip(numbers, lens, self._states, strict=True):
            part = DecodePart(self._table.tensor, sent[lens_], host)
            batch = Batch(sent[at_], sent[at_], sent[slots_], sent[at_], part, states=states)
            prepare_kernels(self._kernels, states, batch)
            batches.append(batch)
        return sent[own_rows], batches, [tuple(sent[n] for n in some) for some in settings]

    def capture(self, backend: GraphBackend) -> None:
        """Run it over spare rows alone, then record it."""
        place, size = self._place, self.size
        rows, batches, settings = self._send((), ())
        sample = place.sampler.ops.sample
        kept = place.base.last_tokens.view(-1, place.width)[:, 1 : 1 + self.drafts]

        def run() -> None:
            logits, hidden = place.tail_logits[:size], place.tail[:size]
            found = [sample(logits, *settings[0])]
            for batch, some in zip(batches, settings[1:], strict=True):
                prepare_kernels(self._kernels, batch.states, batch, self._kernels)
                hidden = place.draft.forward(batch, hidden, found[-1], place.draft_caches, None)
                place.draft.logits(hidden, logits)
                found.append(sample(logits, *some))
            kept.index_copy_(0, rows, torch.stack(found, dim=1))

        self._replay = captured(run, backend, decode_step(self.size))

    def replay(self, works: Sequence[Work], ends: Sequence[int]) -> list[Tensor]:
        """Draft behind the positions `ends`: [works, drafts] ids."""
        assert self._replay is not None, "replayed before it was captured"
        rows, _, _ = self._send(works, ends)
        self._replay()
        drafts = self._place.base.last_tokens.view(-1, self._place.width)[rows[: len(works)]]
        return [drafts[:, 1 : 1 + self.drafts]]
