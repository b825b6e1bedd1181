"""Steps that draft and verify, captured: of each size the model's forward over the last tokens and
their drafts, the draft layer's run over the same tokens, and its runs behind them.

Between the first two the model's draws say which drafts were right; how many these are the host
must know before the third, because keys have other places then. Spare rows and sequences are as in
`engine/graphs.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_runtime.engine.graphs import Place, captured
from ds_runtime.engine.sampler import Draw, Sampler
from ds_runtime.engine.step import StepPlan, Work
from ds_runtime.engine.transfer import Upload
from ds_runtime.model.deepseek import DeepSeekModel
from ds_runtime.model.draft import DraftModel
from ds_runtime.ops.batch import Batch, DecodePart, Limits
from ds_runtime.platform.spec import GraphBackend
from ds_runtime.progress import Progress
from ds_runtime.speculation import Speculation


@dataclass(frozen=True, slots=True)
class CyclePlace:
    """What all captured cycles of a runner share. width: tokens per row of last_tokens.

    hidden: [rows, hidden] and logits [rows, vocab] of the largest verification; tail, tail_logits:
    the same of the draft layer, a row per sequence.
    """

    base: Place
    model: DeepSeekModel
    draft: DraftModel
    sampler: Sampler
    layers: list[Tensor]
    draft_caches: Sequence[Tensor]
    width: int
    hidden: Tensor
    logits: Tensor
    tail: Tensor
    tail_logits: Tensor

    def limits(self, size: int, queries: int) -> Limits:
        return replace(
            self.base.limits,
            max_tokens=size * queries,
            max_sequences=size,
            max_queries=queries,
        )

    def table(self, size: int) -> Tensor:
        """[size, most pages], of spare pages."""
        shape = (size, self.base.limits.max_pages_per_sequence)
        return torch.full(shape, self.base.spare_page, dtype=torch.int32, device=self.base.device)


def _tables(
    works: Sequence[Work], size: int, spare: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """All pages of every work, filled up with its first: [size, most] int32."""
    width = max((len(w.pages) for w in works), default=1)
    found = np.full((size, width), spare, np.int32)
    for i, work in enumerate(works):
        found[i] = work.pages[0]
        found[i, : len(work.pages)] = work.pages
    return found


class _Numbers(NamedTuple):
    """A verification's arrays, by their numbers in an upload. All but the table have places."""

    places: int
    positions: int
    slots: int
    kv_lens: int
    adapters: int | None
    table: int


class VerifyGraph:
    """`size` sequences with `queries` tokens each: `hidden` and `logits` of the place receive the
    model's results, `tail` and `tail_logits` the draft layer's behind the last kept token.
    """

    def __init__(self, place: CyclePlace, size: int, queries: int) -> None:
        self.size, self.queries = size, queries
        self._place = place
        base, rows = place.base, size * queries
        bounds = place.limits(size, queries)
        self._states = {key: kernel.state(bounds) for key, kernel in base.stateful.items()}
        self._table = place.table(size)
        room = rows * 256 + size * (256 + 4 * base.limits.max_pages_per_sequence) + (1 << 13)
        self.buffer = torch.zeros(room, dtype=torch.uint8, device=base.device)
        self.ids = torch.zeros(rows, dtype=torch.int64, device=base.device)
        self.last = torch.zeros(size, dtype=torch.int64, device=base.device)
        self._rows = torch.arange(rows, device=base.device)
        self._verify: Callable[[], None] | None = None
        self._follow: Callable[[], None] | None = None

    def add(self, works: Sequence[Work], upload: Upload) -> _Numbers:
        """A step's inputs, filled up: the first arrays of its upload. A work with fewer tokens has
        spare ones behind them, which nothing that counts sees.
        """
        place, base, queries = self._place, self._place.base, self.queries
        size, page = base.limits.page_size, np.arange(queries)
        shape = (self.size, queries)
        spare = base.last_tokens.shape[0] - place.width
        places, positions = np.full(shape, spare, np.int64), np.zeros(shape, np.int64)
        slots, kv_lens = np.full(shape, -1, np.int64), np.full(self.size, queries, np.int32)
        table, count = _tables(works, self.size, base.spare_page), len(works)
        if works:
            starts = np.array([w.start for w in works], np.int64)
            lengths = np.array([w.length for w in works], np.int64)
            places[:count] = (
                np.array([w.row for w in works], np.int64)[:, None] * place.width + page
            )
            real = page < lengths[:, None]
            positions[:count] = starts[:, None] + np.where(real, page, 0)
            pages = np.take_along_axis(table[:count], positions[:count] // size, 1)
            own = pages.astype(np.int64) * size + positions[:count] % size
            slots[:count] = np.where(real, own, -1)
            kv_lens[:count] = starts + queries
        adapters = None
        if base.adapts:
            held = np.full(shape, -1, np.int32)
            held[:count] = np.array([w.adapter for w in works], np.int32)[:, None]
            adapters = held.reshape(-1)
        return _Numbers(
            places=upload.add(places.reshape(-1)),
            positions=upload.add(positions.reshape(-1)),
            slots=upload.add(slots.reshape(-1)),
            kv_lens=upload.add(kv_lens),
            adapters=None if adapters is None else upload.add(adapters),
            table=upload.add(table),
        )

    def _prepare(self, works: Sequence[Work], sent: Upload, numbers: _Numbers) -> Batch:
        compact, queries = sent[numbers.table], self.queries
        self._table[:, : compact.shape[1]].copy_(compact)
        lens = (*(w.start + queries for w in works), *((queries,) * (self.size - len(works))))
        batch = Batch(
            input_ids=sent[numbers.places],
            positions=sent[numbers.positions],
            slots=sent[numbers.slots],
            logit_rows=self._rows,
            decode=DecodePart(
                self._table,
                sent[numbers.kv_lens],
                lens,
                (queries,) * self.size if queries > 1 else (),
            ),
            states=self._states,
            adapters=None if numbers.adapters is None else sent[numbers.adapters],
        )
        for key, kernel in self._place.base.stateful.items():
            kernel.prepare(self._states[key], batch)
        return batch

    def capture(self, backend: GraphBackend) -> None:
        """Run both forwards over spare rows alone, then record them."""
        place, base = self._place, self._place.base
        sent = Upload(base.device)
        numbers = self.add((), sent)
        sent.send(self.buffer)
        batch = self._prepare((), sent, numbers)
        places, rows = batch.input_ids, self.size * self.queries

        def verify() -> None:
            batch.input_ids = base.last_tokens[places]
            hidden = place.model.forward(batch, place.layers, every=True)
            place.hidden[:rows].copy_(hidden)
            place.model.logits(hidden, place.logits[:rows], batch.adapters)

        def follow() -> None:
            hidden = place.hidden[:rows]
            tail = place.draft.forward(batch, hidden, self.ids, place.draft_caches, self.last)
            place.tail[: self.size].copy_(tail)
            place.draft.logits(tail, place.tail_logits[: self.size])

        self._verify = captured(verify, backend, self.size)
        self._follow = captured(follow, backend, self.size)

    def verify(self, works: Sequence[Work], sent: Upload, numbers: _Numbers) -> Tensor:
        """Logits [size · queries, vocab] of a step whose upload has been sent to `buffer`."""
        assert self._verify is not None, "replayed before it was captured"
        self._prepare(works, sent, numbers)
        self._verify()
        return self._place.logits[: self.size * self.queries]

    def follow(self) -> None:
        """The draft layer's run behind `verify`, once `ids` and `last` are set."""
        assert self._follow is not None, "replayed before it was captured"
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
        room = size * (drafts * 64 + 128 + 4 * base.limits.max_pages_per_sequence)
        room += (1 << 10) * (drafts + 1)
        self._buffer = torch.zeros(room, dtype=torch.uint8, device=base.device)
        self._replay: Callable[[], None] | None = None

    def _send(
        self, works: Sequence[Work], ends: Sequence[int]
    ) -> tuple[Tensor, list[Batch], list[tuple[Tensor, ...]]]:
        """Rows, the batch of each run and the settings of each draw, at their places."""
        place, base, count = self._place, self._place.base, len(works)
        sampler, size = place.sampler, base.limits.page_size
        sent = Upload(base.device)
        rows = np.full(self.size, base.last_tokens.shape[0] // place.width - 1, np.int64)
        rows[:count] = [w.row for w in works]
        table = _tables(works, self.size, base.spare_page)
        most = base.limits.max_pages_per_sequence * size
        room = np.array([min(len(w.pages) * size, most) for w in works], np.int64)
        numbers, lens = [], []
        for step in range(1, self.drafts):
            at, slots = np.zeros(self.size, np.int64), np.full(self.size, -1, np.int64)
            if works:
                want = np.array(ends, np.int64) + step
                at[:count] = np.minimum(want, room - 1)
                pages = np.take_along_axis(table[:count], at[:count, None] // size, 1)[:, 0]
                own = pages.astype(np.int64) * size + at[:count] % size
                slots[:count] = np.where(at[:count] == want, own, -1)
            kv_lens = (at + 1).astype(np.int32)
            lens.append(tuple(kv_lens.tolist()))
            numbers.append([sent.add(a) for a in (at, slots, kv_lens)])
        settings = []
        for step in range(self.drafts):
            draws = [Draw(w.row, e + 2 + step) for w, e in zip(works, ends, strict=True)]
            settings.append([sent.add(a) for a in sampler.settings(draws, self.size)])
        own_rows, compact = sent.add(rows), sent.add(table)
        sent.send(self._buffer)
        self._table[:, : table.shape[1]].copy_(sent[compact])
        batches = []
        for (at_, slots_, lens_), host, states in zip(numbers, lens, self._states, strict=True):
            part = DecodePart(self._table, sent[lens_], host)
            batch = Batch(sent[at_], sent[at_], sent[slots_], sent[at_], part, states=states)
            for key, kernel in self._kernels.items():
                kernel.prepare(states[key], batch)
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
                hidden = place.draft.forward(batch, hidden, found[-1], place.draft_caches, None)
                place.draft.logits(hidden, logits)
                found.append(sample(logits, *some))
            kept.index_copy_(0, rows, torch.stack(found, dim=1))

        self._replay = captured(run, backend, self.size)

    def replay(self, works: Sequence[Work], ends: Sequence[int]) -> Tensor:
        """Draft behind the positions `ends`: [works, drafts] ids."""
        assert self._replay is not None, "replayed before it was captured"
        rows, _, _ = self._send(works, ends)
        self._replay()
        drafts = self._place.base.last_tokens.view(-1, self._place.width)[rows[: len(works)]]
        return drafts[:, 1 : 1 + self.drafts]


class Cycles:
    """The captured cycles of a runner. drafts: how many a step may draft; sizes: in sequences."""

    def __init__(
        self, place: CyclePlace, sizes: Sequence[int], drafts: Sequence[int], backend: GraphBackend
    ) -> None:
        self.sizes = tuple(sizes)
        self.place = place
        self._queries = sorted({n + 1 for n in drafts})
        self._backend = backend
        self._verify = {
            (size, queries): VerifyGraph(place, size, queries)
            for size in self.sizes
            for queries in self._queries
        }
        self._chain = {
            (size, n): ChainGraph(place, size, n) for size in self.sizes for n in drafts if n
        }

    @staticmethod
    def of(
        base: Place,
        draft: DraftModel,
        sampler: Sampler,
        layers: list[Tensor],
        draft_caches: Sequence[Tensor],
        shape: Speculation,
        sizes: Sequence[int],
        backend: GraphBackend,
    ) -> Cycles:
        """With what they share. layers: the model's caches; draft_caches: the draft layer's."""
        model, most, queries = draft.model, max(sizes), max(shape.choices) + 1

        def made(rows: int, columns: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(rows, columns, dtype=kind, device=base.device)

        width, dtype = model.config.hidden, model.dtype
        place = CyclePlace(
            base=base,
            model=model,
            draft=draft,
            sampler=sampler,
            layers=layers,
            draft_caches=draft_caches,
            width=shape.tokens,
            hidden=made(most * queries, width, dtype),
            logits=made(most * queries, base.vocab, torch.float32),
            tail=made(most, width, dtype),
            tail_logits=made(most, base.vocab, torch.float32),
        )
        return Cycles(place, sizes, shape.choices, backend)

    @torch.inference_mode()
    def capture(self, progress: bool = False) -> None:
        """Capture everything, the largest first: the others find their memory in its pool."""
        graphs: list[VerifyGraph | ChainGraph] = [*self._verify.values(), *self._chain.values()]
        with Progress(
            "capturing steps with drafts", len(graphs), "graphs", enabled=progress
        ) as bar:
            for graph in sorted(graphs, key=lambda g: -g.size):
                graph.capture(self._backend)
                bar.advance(1)

    def _size(self, count: int) -> int | None:
        index = bisect_left(self.sizes, count)
        return None if index == len(self.sizes) else self.sizes[index]

    def fitting(self, plan: StepPlan) -> VerifyGraph | None:
        """The graph for a step: none if it holds prefill works or more rows than any, or drafts as
        many tokens as no other.
        """
        works, size = plan.works, self._size(len(plan.works))
        if size is None or any(w.tokens is not None for w in works):
            return None
        if plan.drafts and (size, plan.drafts) not in self._chain:
            return None
        index = bisect_left(self._queries, max(w.length for w in works))
        return None if index == len(self._queries) else self._verify[size, self._queries[index]]

    def chain(self, count: int, drafts: int) -> ChainGraph | None:
        """The graph that drafts behind so many sequences."""
        size = self._size(count)
        return None if size is None else self._chain.get((size, drafts))
