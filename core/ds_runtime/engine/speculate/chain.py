"""Chains of drafts behind what a step has kept: one run of the draft layer per further draft.

Drafts are drawn with the very random numbers with which the model will draw these positions, so
that they are often right also where requests sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ds_runtime.engine.capture.recorder import Phase, Recorder
from ds_runtime.engine.device.parts import Parts, Results
from ds_runtime.engine.step.inputs import DraftRun, Frame
from ds_runtime.engine.step.masked_draw import placed
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.row_order import sequence_places
from ds_runtime.engine.step.sampler import Draw
from ds_runtime.engine.step.transfer import Array, Buffer, Steady, Upload
from ds_runtime.ops.batch import Batch, Spread


class Chain:
    """`drafts` drafts of each sequence into their rows' places: of any number of sequences, op by
    op, or of `size` on each rank, captured.
    """

    def __init__(self, parts: Parts, drafts: int, size: int = 0) -> None:
        assert parts.draft is not None
        self.size, self.drafts = size, drafts
        self._parts, self._draft = parts, parts.draft
        key = self._draft.state_key
        self._keys = frozenset((key,) if key else ())  # none where attention is sparse
        self._frames: list[Frame | None] = [None] * (drafts - 1)
        self._batches = list[Batch]()
        self._own: Tensor | slice = slice(None)  # of the sequences of all ranks
        self._steady: Steady | None = None
        self._buffer: Buffer | None = None
        if size:
            self._frames = [parts.frame(size, 1, self._keys) for _ in range(drafts - 1)]
            rows = size * parts.ranks
            self._buffer = Buffer((size * 24 + (1 << 8)) * drafts, parts.device)
            self._steady = Steady(rows * (drafts * 32 + 8) + (1 << 10), parts.device)
        self.replay: Phase = self._phase

    def capture(self, recorder: Recorder, results: Results, what: str) -> None:
        """Record it over dummies alone, from `results` on."""
        assert self.size
        rows = self.size * self._parts.ranks
        spread = None if self._parts.ranks == 1 else Spread(self.size, self.size)
        self._load((), (), results.tail[: self.size], results.tail_logits[:rows], spread)
        self.replay = recorder.record(self._phase, what)

    def run(
        self,
        works: Sequence[Work],
        ends: Sequence[int],
        tell: bool,
        tail: Tensor,
        logits: Tensor,
        spread: Spread | None,
    ) -> list[Tensor]:
        """Draft behind the positions `ends` of the sampling works: [works, drafts] ids, if these
        are to be told. tail, logits: of the draft layer's run over the step; spread: how the works
        lie on the ranks; all as they were captured, if this is.
        """
        self._load(works, ends, tail, logits, spread)
        self.replay()
        if not tell:
            return []
        places = self._places(works)
        told = self._kept.index_select(0, self._rows)
        return [told[: len(works)] if self._parts.ranks == 1 or not self.size else told[places]]

    def _places(self, works: Sequence[Work]) -> list[int]:
        """Where each sequence lies among all."""
        if not self.size:
            return list(range(len(works)))
        return sequence_places(works, self._parts.ranks, self.size)

    def _load(
        self,
        works: Sequence[Work],
        ends: Sequence[int],
        tail: Tensor,
        logits: Tensor,
        spread: Spread | None,
    ) -> None:
        """The batch of each run behind the first draft, and what the draws need. The page table is
        there: the step has verified these works.
        """
        parts, upload = self._parts, Upload(self._parts.device)
        own = [i for i, w in enumerate(works) if parts.ranks == 1 or w.rank == parts.rank]
        mine = [works[i] for i in own]
        added = [
            parts.inputs.add(mine, upload, frame, run=DraftRun([ends[i] + step for i in own]))
            for step, frame in enumerate(self._frames, 1)
        ]
        arrays = self._draws(works, ends)
        if self._steady is not None:
            sent = self._steady.send(arrays)
            self._own = slice(parts.rank * self.size, (parts.rank + 1) * self.size)
            upload.send(self._buffer)
        else:
            numbers, which = [upload.add(a) for a in arrays], upload.add(np.array(own, np.int64))
            upload.send()
            sent = [upload[number] for number in numbers]
            self._own = upload[which]
        self._rows, *columns = sent
        count = self._rows.shape[0]
        self._settings = [
            [column[first : first + count] for column in columns]
            for first in range(0, count * self.drafts, count)
        ]
        self._tail, self._logits, batches = tail, logits, list[Batch]()
        for step, frame in zip(added, self._frames, strict=True):
            states = self._parts.states if frame is None else frame.states
            batches.append(batch := step.batch(upload, states))
            batch.spread = spread
            if frame is not None:
                parts.prepare(batch)
        if not self.size or not self._batches:  # else the recording's go on
            self._batches = batches

    def _draws(self, works: Sequence[Work], ends: Sequence[int]) -> list[Array]:
        """Rows, and the settings of all draws, one draft after the other."""
        sampler, rows = self._parts.sampler, tuple(w.row for w in works)
        size = self.size * self._parts.ranks or len(works)
        spare = self._parts.last_tokens.shape[0] // self._parts.width - 1
        places = tuple(self._places(works))
        draws: list[Draw | None] = []
        if any(sampler.row(row).params.temperature > 0.0 for row in rows):  # else greedy
            for behind in range(2, 2 + self.drafts):
                some = [Draw(r, e + behind) for r, e in zip(rows, ends, strict=True)]
                draws += placed(some, np.array(places, np.int64), size)
        return [_rows(rows, places, size, spare), *sampler.settings(draws, self.drafts * size)]

    @property
    def _kept(self) -> Tensor:
        """Where drafts lie, of every row there is: [rows, drafts] int64."""
        parts = self._parts
        return parts.last_tokens.view(-1, parts.width)[:, 1 : 1 + self.drafts]

    def _phase(self) -> None:
        parts, draft, logits, hidden = self._parts, self._draft, self._logits, self._tail
        sample = parts.sampler.ops.sample
        found = [sample(logits, *self._settings[0])]
        for batch, frame, some in zip(self._batches, self._frames, self._settings[1:], strict=True):
            if frame is None:
                parts.prepare_all(batch, self._keys)
            else:
                parts.prepare(batch, self._keys)
            ids = found[-1] if batch.spread is None else found[-1][self._own]
            hidden = draft.forward(batch, hidden, ids, parts.draft_caches, None)
            out = None if frame is None else logits
            logits = draft.logits(parts.model.wanted(hidden, batch.spread), out)
            found.append(sample(logits, *some))
        self._kept.index_copy_(0, self._rows, torch.stack(found, dim=1))


@lru_cache(maxsize=256)
def _rows(rows: tuple[int, ...], places: tuple[int, ...], size: int, spare: int) -> Array:
    """[size] int64, filled up with the spare one. Nobody writes to it."""
    found = np.full(size, spare, np.int64)
    found[list(places)] = rows
    return found
