"""Captured steps of decode works: this many sequences of this many tokens on each rank.

The forward is one recording. Without a draft layer draws follow it op by op, or in a recording of
their own where masks go with them. With one, chains are drawn and judged in a second recording, if
nothing else goes with their draws. The third recording is the draft layer's run over the same
tokens. Drafts are made once the host knows how many were kept.

Dummies write nothing, read one token of a page that belongs to nobody, and begin with a row of
`last_tokens` that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_runtime.engine.capture.recorder import Phase, Recorder
from ds_runtime.engine.device.parts import Parts, Results, draw
from ds_runtime.engine.speculate.branching import branching
from ds_runtime.engine.speculate.chain import Drafting, Drafts
from ds_runtime.engine.speculate.verdict import Judged, Verdict
from ds_runtime.engine.step.inputs import Added, read_last_tokens
from ds_runtime.engine.step.masked_draw import MaskedDraw
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.result import Handle, finite_rows
from ds_runtime.engine.step.sampler import Draws
from ds_runtime.engine.step.transfer import Buffer, Upload
from ds_runtime.parallel.exchange import Pending
from ds_runtime.parallel.row_order import Placed


def decode_step(size: int) -> str:
    """What is captured, for an error. size: its requests."""
    return f"a decode step of {size} requests"


@dataclass(slots=True)
class _ReplayedStep:
    """What phases leave for those behind them. number: of the rows of draws in what was sent, if
    they are not the first.
    """

    handle: Handle
    sent: Upload = field(init=False)
    at: Placed = field(init=False)
    draws: Draws = field(init=False)
    judged: Judged = field(init=False)
    number: int | None = None
    drafting: Drafting | None = None


class Replayed:
    """The phases of one size. drafting: by number of drafts, what makes that many of its steps."""

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
        self._branched = parts.branched if queries > 1 else None
        own, every = size * queries, size * queries * parts.exchange.groups
        self.logits, self.finite = results.logits[:every], results.finite[:every]
        # Inputs, the table as narrow as a step needs it, and what draws need.
        table = 4 * self._frame.table.tensor.numel()
        self._buffer = Buffer(every * 128 + own * 128 + table + (1 << 13), parts.device)
        self.masked = MaskedDraw(parts.sampler.ops, self.logits) if masked else None
        self.verdict: Verdict | None = None
        if parts.draft is not None:
            ways = None if self._branched is None else branching(parts.shape)
            self.verdict = Verdict(parts, results, self._frame, self.logits, self.finite, ways)
        self.replay: Phase | None = None

    def _add(self, works: Sequence[Work], upload: Upload) -> tuple[Added, Pending]:
        """A step's inputs: the first arrays of its upload."""
        parts, exchange = self._parts, self._parts.exchange
        order = exchange.captured(works, self.size, self.queries, parts.adapts, upload)
        return parts.inputs.add(exchange.own(works), upload, self._frame, self._branched), order

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

    def begin(self, handle: Handle, judges: bool) -> _ReplayedStep:
        """judges: is for steps op by op; behind a verification drafts always are."""
        return _ReplayedStep(handle)

    def inputs(self, step: _ReplayedStep) -> None:
        """Send what the step is made of, and tell kernels of it. What draws behind a verification
        need is sent while the device verifies: the step before may have left the host no time.
        """
        parts, works = self._parts, step.handle.plan.works
        sent = step.sent = Upload(parts.device)
        added, order = self._add(works, sent)
        at = step.at = Placed(works, parts.exchange.sequences(works, self.size), self.queries)
        if self.verdict is None:
            step.handle.sort(parts.sampler)
            places = None if at.whole else at.rows
            draws = step.handle.wanted.draws
            step.draws = parts.sampler.prepare(draws, sent, self.masked, places)
            step.number = None if at.whole else sent.add(at.rows)
        sent.send(self._buffer)
        parts.batch(added, sent, order())

    def forward(self, step: _ReplayedStep) -> None:
        """The model, over as many rows as were recorded."""
        assert self.replay is not None, "replayed before it was captured"
        self.replay()

    def draw(self, step: _ReplayedStep) -> None:
        """A token per work."""
        if self.verdict is not None:
            self.judge(step)
            return
        handle, sent, number = step.handle, step.sent, step.number
        rows = slice(len(handle.plan.works)) if number is None else sent[number]
        handle.finite = [self.finite[rows].clone()]
        draw(self._parts, handle, step.draws, self.logits[rows], sent)

    def judge(self, step: _ReplayedStep) -> None:
        """Tokens, and which drafts were right."""
        assert self.verdict is not None
        step.judged = self.verdict.run(step.handle, step.at)

    def settle(self, step: _ReplayedStep) -> None:
        """Bring kept branches to their places."""
        assert self.verdict is not None
        self.verdict.settle(step.judged)

    def tell(self, step: _ReplayedStep) -> None:
        """Start to bring the host what was kept."""
        step.drafting = Drafting(self._parts, step.handle, step.judged.accepted)

    def follow(self, step: _ReplayedStep) -> None:
        """The draft layer's run over the step's tokens, with kept branches at their places."""
        assert self.verdict is not None
        self.verdict.follow(self._parts.exchange.own(step.handle.plan.works), step.judged)

    def draft(self, step: _ReplayedStep) -> None:
        """Once the host knows what was kept."""
        exchange, results, size = self._parts.exchange, self._results, self.size
        tail, logits = results.tail[:size], results.tail_logits[: size * exchange.groups]
        assert step.drafting is not None
        made = self._drafting[step.handle.plan.drafts]
        step.drafting.run(made, tail, logits, exchange.even(size))
