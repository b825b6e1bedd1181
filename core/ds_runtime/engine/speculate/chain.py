"""Drafts after what a step has kept; of chains, one run of the draft layer per further draft.

A chain's drafts are drawn with the very random numbers with which the model will draw these
positions, so that they are often right also where requests sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_runtime.engine.capture.recorder import Phase, Recorder
from ds_runtime.engine.device.parts import Parts, Results
from ds_runtime.engine.step.inputs import Added, DraftRun, Frame
from ds_runtime.engine.step.masked_draw import placed
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.result import Handle
from ds_runtime.engine.step.sampler import Draw
from ds_runtime.engine.step.transfer import Array, Buffer, Download, Steady, Upload, taken
from ds_runtime.ops.batch import Batch, RowOrder


class KeptTokens(NamedTuple):
    """What drafts come behind. works: the sampling ones of a step, each of which keeps the
    positions up to one of `ends`. tail [own sequences, hidden], logits [sequences, vocab]: of the
    draft layer's run over the step; order: of the rows that these works have there. A captured
    drafting takes these three as it was recorded.
    """

    works: Sequence[Work]
    ends: Sequence[int]
    tail: Tensor
    logits: Tensor
    order: RowOrder | None


class Drafts(ABC):
    """What drafts behind a step, in `runs` runs of `queries` tokens after the step's own: of any
    number of sequences, op by op, or of `size` on each rank, captured. key: of the state of the
    draft layer's attention; none where that is sparse.
    """

    def __init__(self, parts: Parts, size: int, runs: int, queries: int, key: str) -> None:
        assert parts.draft is not None
        self.size = size
        self._parts, self._draft = parts, parts.draft
        self._keys = frozenset((key,) if key else ())
        self._frames: list[Frame | None] = [None] * runs
        self._buffer: Buffer | None = None
        if size:
            self._frames = [parts.frame(size, queries, self._keys) for _ in range(runs)]
            rows = size * queries
            room = (runs + 1) * (rows * 32 + (1 << 10)) + size * parts.exchange.groups * 16
            self._buffer = Buffer(room, parts.device)
        self._batches = list[Batch]()  # the runs, of what was recorded if this is captured

    @abstractmethod
    def capture(self, recorder: Recorder, results: Results, what: str) -> None:
        """Record it over dummies alone, from `results` on."""

    @abstractmethod
    def run(self, kept: KeptTokens, tell: bool) -> list[Tensor]:
        """Draft after what a step has kept. If drafts are to be told: [works, drafts] ids, and
        where they branch likewise the parents.
        """

    def _dummies(self, results: Results) -> KeptTokens:
        """What a recording is made over."""
        exchange = self._parts.exchange
        logits = results.tail_logits[: self.size * exchange.groups]
        return KeptTokens((), (), results.tail[: self.size], logits, exchange.even(self.size))

    def _places(self, works: Sequence[Work]) -> list[int]:
        """Where each sequence lies among all."""
        if not self.size:
            return list(range(len(works)))
        return self._parts.exchange.sequences(works, self.size)

    def _rows_of(self, works: Sequence[Work]) -> Array:
        """[sequences] int64: each one's row of last_tokens, and the spare one of dummies."""
        parts, rows, places = self._parts, tuple(w.row for w in works), tuple(self._places(works))
        size = self.size * parts.exchange.groups or len(works)
        return _rows(rows, places, size, parts.last_tokens.shape[0] // parts.width - 1)

    def _told(self, values: Tensor, works: Sequence[Work]) -> Tensor:
        """[works, …] of a tensor of all sequences, before the next step's."""
        return taken(values, self._places(works))

    def _take(self, added: Sequence[Added], sent: Upload) -> list[Batch]:
        """The batches of a step's runs; what a recording runs over stays what it was."""
        parts, batches = self._parts, list[Batch]()
        for run, frame in zip(added, self._frames, strict=True):
            if frame is None:
                batches.append(run.batch(sent, parts.states))
            else:
                seen = frame.seen if frame.queries > 1 else None
                batches.append(run.batch(sent, frame.states, seen))
        if not self.size or not self._batches:
            self._batches = batches
        return batches

    def _prepare(self, batch: Batch) -> None:
        """Tell the kernels of a run, within it."""
        self._parts.prepare(batch, self._keys, inside=True if self.size else None)


class Drafting:
    """Drafts behind a step, from construction on, where what was kept starts for the host."""

    def __init__(self, parts: Parts, handle: Handle, accepted: Tensor) -> None:
        """accepted: [sampling works] drafts that were right."""
        self._handle = handle
        self._arriving = Download([accepted])
        self._tells = any(w.tell_drafts for w in handle.plan.works)
        if parts.leads and not self._tells:  # what was drawn is on its way while drafts are made
            handle.download()

    def run(self, drafts: Drafts, tail: Tensor, logits: Tensor, order: RowOrder | None) -> None:
        """Wait for what was kept, and draft after it. tail, logits, order: see KeptTokens."""
        handle = self._handle
        works = [handle.plan.works[i] for i, _ in handle.wanted.samplers]
        accepted = self._arriving.wait()[0].tolist()
        ends = [
            w.start + w.length - w.draws + right for w, right in zip(works, accepted, strict=True)
        ]
        handle.drafts = drafts.run(KeptTokens(works, ends, tail, logits, order), self._tells)


class Chain(Drafts):
    """`drafts` drafts of each sequence into their rows' places."""

    def __init__(self, parts: Parts, drafts: int, size: int = 0) -> None:
        assert parts.draft is not None
        super().__init__(parts, size, drafts - 1, 1, parts.draft.state_key)
        self.drafts = drafts
        self._mine = parts.exchange.section(size)
        self._steady: Steady | None = None
        if size:
            rows = size * parts.exchange.groups
            self._steady = Steady(rows * (drafts * 32 + 8) + (1 << 10), parts.device)
        self.replay: Phase = self._phase

    def capture(self, recorder: Recorder, results: Results, what: str) -> None:
        self._load(self._dummies(results))
        self.replay = recorder.record(self._phase, what)

    def run(self, kept: KeptTokens, tell: bool) -> list[Tensor]:
        self._load(kept)
        self.replay()
        return [self._told(self._kept[self._rows], kept.works)] if tell else []

    def _load(self, kept: KeptTokens) -> None:
        """The batch of each run behind the first draft, and what the draws need. The page table is
        there: the step has verified these works.
        """
        works, ends, parts, upload = kept.works, kept.ends, self._parts, Upload(self._parts.device)
        own = parts.exchange.numbers(works)
        mine = [works[i] for i in own]
        added = [
            parts.inputs.add(mine, upload, frame, run=DraftRun([ends[i] + step for i in own]))
            for step, frame in enumerate(self._frames, 1)
        ]
        arrays = self._draws(works, ends)
        if self._steady is not None:
            sent = self._steady.send(arrays)
            if added:
                upload.send(self._buffer)
        else:
            numbers = [upload.add(a) for a in arrays]
            self._mine = parts.exchange.pick(own, upload)
            upload.send()
            sent = [upload[number] for number in numbers]
        self._rows, *columns = sent
        count = self._rows.shape[0]
        self._settings = [
            [column[first : first + count] for column in columns]
            for first in range(0, count * self.drafts, count)
        ]
        self._tail, self._logits = kept.tail, kept.logits
        for batch in self._take(added, upload):
            batch.order = kept.order
            if self.size:
                parts.prepare(batch, inside=False)

    def _draws(self, works: Sequence[Work], ends: Sequence[int]) -> list[Array]:
        """Rows, and the settings of all draws, one draft after the other."""
        sampler, rows = self._parts.sampler, tuple(w.row for w in works)
        size = self.size * self._parts.exchange.groups or len(works)
        draws, places = list[Draw | None](), np.array(self._places(works), np.int64)
        if any(sampler.row(row).params.temperature > 0.0 for row in rows):  # else greedy
            for behind in range(2, 2 + self.drafts):
                some = [Draw(r, e + behind) for r, e in zip(rows, ends, strict=True)]
                draws += placed(some, places, size)
        return [self._rows_of(works), *sampler.settings(draws, self.drafts * size)]

    @property
    def _kept(self) -> Tensor:
        """Where drafts lie, of every row there is: [rows, drafts] int64."""
        parts = self._parts
        return parts.last_tokens.view(-1, parts.width)[:, 1 : 1 + self.drafts]

    def _phase(self) -> None:
        parts, draft, logits, hidden = self._parts, self._draft, self._logits, self._tail
        sample = parts.sampler.ops.sample
        found = [sample(logits, *self._settings[0])]
        for batch, some in zip(self._batches, self._settings[1:], strict=True):
            self._prepare(batch)
            ids, out = self._mine(found[-1]), logits if self.size else None
            hidden = draft.forward(batch, hidden, ids, parts.caches, None)
            logits = draft.logits(parts.exchange.collect(hidden, batch.order), out)
            found.append(sample(logits, *some))
        self._kept.index_copy_(0, self._rows, torch.stack(found, dim=1))


@lru_cache(maxsize=256)
def _rows(rows: tuple[int, ...], places: tuple[int, ...], size: int, spare: int) -> Array:
    """[size] int64, filled up with the spare one. Nobody writes to it."""
    found = np.full(size, spare, np.int64)
    found[list(places)] = rows
    return found
