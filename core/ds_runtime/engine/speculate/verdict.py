"""What follows a captured verification: the draws, which drafts these keep, and the draft layer's
run over the same tokens. Between that and further drafts the host waits for how many were kept,
because keys have other places then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_runtime.engine.capture.recorder import Phase, Recorder
from ds_runtime.engine.device.parts import Parts, Results, draw
from ds_runtime.engine.speculate.acceptance import (
    Branch,
    Claims,
    claim,
    claimed,
    fronts,
    settle,
)
from ds_runtime.engine.speculate.branching import Branching
from ds_runtime.engine.speculate.follow import follow
from ds_runtime.engine.step.inputs import Frame
from ds_runtime.engine.step.masked_draw import placed
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.result import Handle
from ds_runtime.engine.step.transfer import Array, Buffer, Steady, Upload, put, taken
from ds_runtime.ops.batch import Batch
from ds_runtime.parallel.row_order import Pick, Placed


class Judged(NamedTuple):
    """accepted: [works] drafts that were right. Of draws op by op: what was kept, the row of each
    draw on this rank, and what is this rank's of draws and works.
    """

    accepted: Tensor
    kept: tuple[Branch, Tensor, Pick, Pick] | None = None


class Verdict:
    """Behind a verification of `frame` on every rank, whose logits are `logits` [rows, vocab] and
    numbers where `finite` [rows]. branching: if its drafts are no chains.
    """

    def __init__(
        self,
        parts: Parts,
        results: Results,
        frame: Frame,
        logits: Tensor,
        finite: Tensor,
        branching: Branching | None,
    ) -> None:
        self._parts, self._results, self._frame = parts, results, frame
        self._logits, self._finite = logits, finite
        size, queries, device = frame.size, frame.queries, parts.device
        groups = parts.exchange.groups

        def made(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self._ids, self._accepted = made(frame.rows * groups), made(size * groups)
        self._last = made(size)
        self._firsts = torch.arange(0, frame.rows, queries, device=device)
        self._rows = parts.exchange.section(frame.rows)
        self._sequences = parts.exchange.section(size)
        spare = parts.last_tokens.shape[0] // parts.width - 1
        dummy = Work(rid="", row=spare, start=0, length=1, pages=[])
        self._dummies = [dummy] * (size * groups)
        rows = frame.rows * groups
        self._steady = Steady(rows * 160 + size * groups * 64 + (1 << 13), device)
        self._buffer = Buffer(rows * 320 + size * groups * 256 + (1 << 14), device)
        self._sent: list[Tensor] = []
        self._claims: Claims | None = None
        self._batch: Batch | None = None
        self._draw: Phase | None = None
        self.replay: Phase | None = None
        self._branching = branching
        self._behind = branching.behind(parts, results, frame) if branching else None

    def capture(self, recorder: Recorder, batch: Batch, what: str) -> None:
        """Run it over dummies alone, behind a captured verification of such, then record it. batch:
        what that ran over.
        """
        parts, frame, results = self._parts, self._frame, self._results
        assert parts.draft is not None and batch.decode is not None
        self._batch = batch
        if self._behind is not None:
            self._behind.capture(recorder, batch, what)
            return
        self._send((), parts.sampler.settings((), self._ids.shape[0]), ())
        self._draw = recorder.record(self._draw_and_judge, what)
        others = parts.draft.state_keys(batch.decode) - parts.model.state_keys(batch.decode)
        hidden, ids = results.hidden[: frame.rows], self._rows(self._ids)
        tail = parts.exchange.even(frame.size)

        def run() -> None:
            parts.prepare(batch, others, inside=True)
            follow(parts, batch, hidden, ids, self._last, tail, True, results)

        self.replay = recorder.record(run, what)

    def _send(
        self, works: Sequence[Work], settings: Sequence[Array], places: Sequence[int]
    ) -> None:
        """Queue the transfer of what the draws of all rows and the verdict need. settings:
        Sample's; places: of the works' sequences.
        """
        parts, every, queries = self._parts, self._dummies.copy(), self._frame.queries
        for place, work in zip(places, works, strict=True):
            every[place] = work
        real, draws = tuple(w.length for w in every), (queries,) * len(every)
        found = claimed(every, draws, real, parts.width, parts.simulated)
        self._sent = self._steady.send([*settings, *found.values()])
        if self._claims is None:
            numbers = {name: len(settings) + i for i, name in enumerate(found)}
            self._claims = Claims(**numbers, most=queries - 1, simulated=False)

    def _draw_and_judge(self) -> None:
        parts, claims, sent = self._parts, self._claims, self._sent
        assert claims is not None and parts.shape is not None
        self._ids.copy_(parts.sampler.ops.sample(self._logits, *sent[:5]))
        front = fronts(claims, parts.last_tokens, None, sent)
        branch = settle(claims, parts.width, self._ids, front, parts.last_tokens, sent)
        self._accepted.copy_(branch.accepted)
        torch.add(self._firsts, self._sequences(self._accepted), out=self._last)

    def run(self, handle: Handle, at: Placed) -> Judged:
        """Draw and judge a step that has been verified. at: where its works are."""
        handle.sort(self._parts.sampler)
        if self._draw is not None and self._parts.sampler.plain(handle.wanted.draws):
            return self._plain(handle, at)
        return self._op_by_op(handle, at)

    def _plain(self, handle: Handle, at: Placed) -> Judged:
        parts, works, count = self._parts, handle.plan.works, len(at.rows)
        every = self._ids.shape[0]
        draws = placed(handle.wanted.draws, at.rows, every)
        self._send(works, parts.sampler.settings(draws, every), at.sequences)
        assert self._draw is not None
        self._draw()
        if at.whole:
            tokens, finite = self._ids[:count].clone(), self._finite[:count].clone()
        else:
            rows = put(at.rows, np.int64, parts.device)
            tokens, finite = self._ids[rows], self._finite[rows]
        accepted = taken(self._accepted, at.sequences)  # before the next step's
        handle.tokens, handle.finite = [tokens], [finite]
        if self._frame.queries > 1:
            handle.accepted = [accepted]
        return Judged(accepted)

    def _op_by_op(self, handle: Handle, at: Placed) -> Judged:
        """Draws that something goes with, or behind drafts that branch."""
        parts, works, sent = self._parts, handle.plan.works, Upload(self._parts.device)
        draws = parts.sampler.prepare(handle.wanted.draws, sent)
        claims = claim(handle.plan, handle.wanted, parts.width, sent, parts.simulated)
        numbers = [sent.add(array) for array in (at.rows, np.array(at.sequences, np.int64))]
        picks = parts.exchange.picks(works, [w.length for w in works], sent)
        sent.send(self._buffer)
        rows, sequences = (sent[number] for number in numbers)
        logits = self._logits[: len(at.rows)] if at.whole else self._logits[rows]
        handle.finite = [self._finite[rows]]
        branch = draw(parts, handle, draws, logits, sent, claims)
        assert branch is not None
        self._ids.index_copy_(0, rows, handle.tokens[0])
        self._accepted.index_copy_(0, sequences, branch.accepted)
        torch.add(self._firsts, self._sequences(self._accepted), out=self._last)
        return Judged(branch.accepted, (branch, self._rows.local(rows), *picks))

    def settle(self, judged: Judged) -> None:
        """Bring kept branches to their places, where nothing is drafted after them."""
        if judged.kept is not None and judged.kept[0].order is not None:
            assert self._batch is not None and self._branching is not None
            branch, rows, _, own = judged.kept
            self._branching.move(self._parts, self._batch, branch, rows, own)

    def follow(self, works: Sequence[Work], judged: Judged) -> None:
        """The draft layer's run over the step. works: this rank's."""
        if self._behind is None:
            assert self.replay is not None, "replayed before it was captured"
            self.replay()
        else:
            assert judged.kept is not None
            ids, accepted = self._rows(self._ids), self._sequences(self._accepted)
            branch, rows, *which = judged.kept
            self._behind.run(works, branch, rows, (which[0], which[1]), ids, accepted)
