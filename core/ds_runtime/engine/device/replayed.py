"""Captured steps of decode works: this many sequences of this many tokens on each rank.

The forward is one recording. Without a draft layer draws follow it op by op, or in a recording of
their own where masks go with them. With one, chains are drawn and judged in a second recording, if
nothing else goes with their draws. The third is the draft layer's run over the same tokens, and
drafts are made by `Chain` or `Tree` once the host knows how many were kept.

Dummies write nothing, read one token of a page that belongs to nobody, and begin with a row of
`last_tokens` that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_runtime.engine.capture.recorder import Phase, Recorder
from ds_runtime.engine.device.parts import Parts, Results, draw
from ds_runtime.engine.speculate.chain import Drafting, Drafts, Rest
from ds_runtime.engine.speculate.verdict import Verdict
from ds_runtime.engine.step.inputs import Added, read_last_tokens
from ds_runtime.engine.step.masked_draw import MaskedDraw
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.result import Handle, finite_rows
from ds_runtime.engine.step.transfer import Buffer, Upload
from ds_runtime.parallel.exchange import Pending
from ds_runtime.parallel.row_order import Placed


def decode_step(size: int) -> str:
    """What is captured, for an error. size: its requests."""
    return f"a decode step of {size} requests"


class Replayed:
    """One size. drafting: what makes this many drafts of such steps, by their number."""

    def __init__(
        self,
        parts: Parts,
        results: Results,
        size: int,
        queries: int,
        masked: bool,
        drafting: dict[int, Drafts],
    ) -> None:
        """masked: draws behind masks are captured, where there is no draft layer."""
        self.size, self.queries = size, queries
        self._parts, self._results, self._drafting = parts, results, drafting
        self._frame = parts.frame(size, queries, adapts=parts.adapts)
        self._trees = parts.trees if queries > 1 else None
        own, every = size * queries, size * queries * parts.exchange.groups
        self.logits, self.finite = results.logits[:every], results.finite[:every]
        # Inputs, the table as narrow as a step needs it, and what draws need.
        table = 4 * self._frame.table.tensor.numel()
        self._buffer = Buffer(every * 128 + own * 128 + table + (1 << 13), parts.device)
        self.masked = MaskedDraw(parts.sampler.ops, self.logits) if masked else None
        self.verdict: Verdict | None = None
        if parts.draft is not None:
            trees = self._trees is not None
            self.verdict = Verdict(parts, results, self._frame, self.logits, self.finite, trees)
        self.replay: Phase | None = None

    def _add(self, works: Sequence[Work], upload: Upload) -> tuple[Added, Pending]:
        """A step's inputs: the first arrays of its upload."""
        parts, exchange = self._parts, self._parts.exchange
        order = exchange.captured(works, self.size, self.queries, parts.adapts, upload)
        return parts.inputs.add(exchange.own(works), upload, self._frame, self._trees), order

    def capture(self, recorder: Recorder) -> None:
        """Run a step of dummies alone, then record it."""
        parts, sent = self._parts, Upload(self._parts.device)
        added, order = self._add((), sent)
        sent.send(self._buffer)
        batch = parts.batch(added, sent, order())
        places, what = batch.input_ids, decode_step(self.size)
        assert batch.decode is not None
        keys = parts.model.state_keys(batch.decode)

        def forward() -> None:
            parts.prepare(batch, keys, inside=True)
            batch.input_ids = places
            read_last_tokens(batch, parts.last_tokens, places.shape[0])
            batch.index_keys.clear()
            hidden = parts.model.forward(batch, parts.caches, every=True)
            if parts.draft is not None:
                self._results.hidden[: self._frame.rows].copy_(hidden)
            wanted = parts.exchange.collect(hidden, batch.order)
            parts.model.logits(wanted, self.logits, parts.exchange.adapters(batch))
            self.finite.copy_(finite_rows(self.logits))

        self.replay = recorder.record(forward, what)
        if self.verdict is not None:
            self.verdict.capture(recorder, batch, what)
        elif self.masked is not None:
            record = lambda run: recorder.record(run, what)  # noqa: E731
            self.masked.capture(parts.sampler.settings((), self.masked.size), record)

    def run(self, handle: Handle) -> Rest | None:
        """Launch a step; what is left to be done once the host knows what was kept.

        With drafts the device verifies while the host makes ready what follows: the step before may
        have left it no time for that.
        """
        assert self.replay is not None, "replayed before it was captured"
        parts, works, sent = self._parts, handle.plan.works, Upload(self._parts.device)
        added, order = self._add(works, sent)
        at = Placed(works, parts.exchange.sequences(works, self.size), self.queries)
        if self.verdict is None:
            handle.sort(parts.sampler)
            places = None if at.whole else at.rows
            draws = parts.sampler.prepare(handle.wanted.draws, sent, self.masked, places)
            number = None if at.whole else sent.add(at.rows)
        sent.send(self._buffer)
        parts.batch(added, sent, order())
        self.replay()
        if self.verdict is not None:
            return self._verified(self.verdict, handle, at)
        rows = slice(len(works)) if number is None else sent[number]
        handle.finite = [self.finite[rows].clone()]
        draw(parts, handle, draws, self.logits[rows], sent)
        return None

    def _verified(self, verdict: Verdict, handle: Handle, at: Placed) -> Rest | None:
        parts, results, plan, size = self._parts, self._results, handle.plan, self.size
        judged = verdict.run(handle, at)
        if not plan.drafts:
            verdict.settle(judged)
            return None
        drafting = Drafting(parts, handle, judged.accepted)
        verdict.follow(parts.exchange.own(plan.works), judged)
        every = size * parts.exchange.groups
        tail, logits = results.tail[:size], results.tail_logits[:every]
        return drafting.rest(self._drafting[plan.drafts], tail, logits, parts.exchange.even(size))
