"""Any step, op by op: what a captured one does, of as many rows as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from torch.nn.functional import pad

from ds_runtime.engine.capture.prefill import PrefillGraphs
from ds_runtime.engine.device.parts import Parts, draw
from ds_runtime.engine.speculate.acceptance import Branch, Claims, claim
from ds_runtime.engine.speculate.branching import branching
from ds_runtime.engine.speculate.chain import Chain, Drafting
from ds_runtime.engine.speculate.follow import Own, follow
from ds_runtime.engine.step.halves import added, divided
from ds_runtime.engine.step.inputs import read_last_tokens
from ds_runtime.engine.step.result import SCORE_ROWS, Handle, finite_rows
from ds_runtime.engine.step.sampler import Draws
from ds_runtime.engine.step.transfer import Upload, put
from ds_runtime.model.deepseek import DeepSeekModel
from ds_runtime.ops.batch import Batch, RowOrder


@dataclass(slots=True)
class _EagerStep:
    """What phases leave for those behind them. hidden: [T, hidden]; wanted: [logit rows, hidden];
    rows: [draws] the row of each; behind: of the draft layer, as KeptTokens has them; halves: where
    the forward runs over these, in place of batch.
    """

    handle: Handle
    judges: bool
    prompts: bool
    sent: Upload = field(init=False)
    draws: Draws = field(init=False)
    batch: Batch = field(init=False)
    hidden: Tensor = field(init=False)
    wanted: Tensor = field(init=False)
    rows: Tensor = field(init=False)
    behind: tuple[Tensor, Tensor | None, RowOrder | None] = field(init=False)
    halves: Sequence[Batch] = ()
    own: Own | None = None
    claims: Claims | None = None
    branch: Branch | None = None
    drafting: Drafting | None = None


class OpByOp:
    """The phases of a rank's steps, whatever these are. prefills: captured pieces of steps with
    prompts, between whose attentions they run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.prefills: PrefillGraphs | None = None
        self._branching = branching(parts.shape)

    def begin(self, handle: Handle, judges: bool) -> _EagerStep:
        """judges: drafts are, and the draft layer runs over the step's tokens."""
        return _EagerStep(handle, judges, any(w.tokens is not None for w in handle.plan.works))

    def inputs(self, step: _EagerStep) -> None:
        """Send what the step is made of, and tell kernels of it."""
        parts, works = self._parts, step.handle.plan.works
        # With --enable-dp-attention there are none, so one row order serves both.
        halves = () if parts.halves is None else divided(works, parts.halves)
        sent = step.sent = Upload(parts.device)
        wanted = step.handle.sort(parts.sampler)
        step.draws = parts.sampler.prepare(wanted.draws, sent)
        if step.judges:
            step.claims = claim(step.handle.plan, wanted, parts.width, sent, parts.simulated)
            step.own = Own.of(works, parts, sent)
        order = parts.exchange.order(works, sent)
        own = (parts.exchange.own(works), *halves)
        whole = parts.inputs.add(own[0], sent, branched=parts.branched)
        apart = added(whole, halves, parts.inputs, sent) if halves else ()
        sent.send()
        step.batch = parts.batch(whole, sent, order())
        # The first half's decode rows are those of the step, of which kernels have been told.
        step.halves = [half.batch(sent, parts.states) for half in apart]
        for batch, some in zip((step.batch, *step.halves), own, strict=True):
            drawn = sum(w.length for w in some if w.tokens is None)
            read_last_tokens(batch, parts.last_tokens, drawn)

    def forward(self, step: _EagerStep) -> None:
        """The model, over the rank's rows."""
        graph, parts, batch = None, self._parts, step.batch
        if self.prefills is not None and step.prompts and not step.halves:
            graph = self.prefills.graph_for(parts.exchange.most(batch.num_tokens, batch.order))
        if step.halves:
            assert isinstance(parts.model, DeepSeekModel), "see Halves.of"
            found = parts.model.forward_halves(step.halves, parts.caches, step.judges)
            first, rows = step.halves[0], batch.num_tokens
            # Drafts, whose keys may move, are in the first half; rows after it are never read.
            spare = 0, 0, 0, rows - first.num_tokens
            batch.index_keys = [pad(keys, spare) for keys in first.index_keys]
        elif graph is None:
            found = parts.model.forward(batch, parts.caches, step.judges)
        else:
            found = graph.replay(batch, step.judges)
        step.hidden = step.wanted = found
        if step.judges:
            step.wanted = parts.exchange.collect(found[batch.logit_rows], batch.order)
        rows, due = step.wanted.shape[0], step.handle.wanted.rows
        assert rows == due, f"{rows} rows, {due} are due"

    def draw(self, step: _EagerStep) -> None:
        """If any work draws. Where they judge, drafts too."""
        wanted = step.handle.wanted
        if wanted.draws:
            logits = self._logits(step, wanted.draw_rows)
            step.handle.finite = [finite_rows(logits)]
            given = self._parts, step.handle, step.draws, logits, step.sent, step.claims
            step.branch = draw(*given)

    judge = draw

    def score(self, step: _EagerStep) -> None:
        """The tokens of prompts, as they are asked for."""
        wanted, handle = step.handle.wanted, step.handle
        for first in range(0, len(wanted.scores), SCORE_ROWS):
            some = slice(first, first + SCORE_ROWS)
            logits = self._logits(step, wanted.score_rows[some])
            handle.scores.append(self._parts.sampler.score(logits, wanted.scores[some]))
            handle.scored.append(finite_rows(logits))
            del logits  # before the next slice's

    def settle(self, step: _EagerStep) -> None:
        """Bring kept branches to their places."""
        assert step.own is not None
        step.rows = step.sent[step.own.rows]
        if step.branch is not None and step.branch.order is not None:
            step.rows = step.own.drawn.back(step.rows, len(step.handle.wanted.draws))
            if step.batch.decode is not None:
                assert self._branching is not None
                given = self._parts, step.batch, step.branch, step.rows, step.own.works
                self._branching.move(*given)

    def tell(self, step: _EagerStep) -> None:
        """Start to bring the host what was kept, if any work draws."""
        if step.handle.wanted.samplers:
            assert step.branch is not None
            step.drafting = Drafting(self._parts, step.handle, step.branch.accepted)

    def follow(self, step: _EagerStep) -> None:
        """The draft layer's run over the step's tokens."""
        self.settle(step)
        own, branch, batch, sent, hidden = step.own, step.branch, step.batch, step.sent, step.hidden
        assert own is not None
        ids = sent[own.ids].clone()  # what follows each token
        if step.handle.tokens:
            ids.index_copy_(0, sent[own.rows], own.drawn(step.handle.tokens[0]))
        if branch is not None and branch.order is not None:
            assert self._branching is not None
            given = self._parts, step.handle.plan.works, branch, step.rows, own, batch.num_tokens
            cut = self._branching.as_chains(*given)
            batch, own, sent = cut.batch, cut.own, cut.sent
            ids, hidden = ids[cut.takes], hidden[cut.came]
        last = sent[own.firsts]
        if branch is not None:
            last = last + own.works(branch.accepted)
        tail, drafts = own.tail(), step.drafting is not None
        step.behind = (*follow(self._parts, batch, hidden, ids, last, tail, drafts), tail)
        del step.batch, step.hidden, step.wanted  # before drafts take memory

    def draft(self, step: _EagerStep) -> None:
        """Once the host knows what was kept."""
        parts, (tail, logits, order) = self._parts, step.behind
        assert step.drafting is not None and logits is not None
        drafts = step.handle.plan.drafts
        made = self._branching.drafts(parts) if self._branching else Chain(parts, drafts)
        step.drafting.run(made, tail, logits, order)

    def _logits(self, step: _EagerStep, rows: list[int]) -> Tensor:
        """Of some of the logit rows."""
        hidden, adapters = step.wanted, self._parts.exchange.logit_adapters(step.batch)
        if len(rows) < hidden.shape[0]:  # rows are distinct and rising
            picked = put(rows, np.int64, self._parts.device)
            hidden, adapters = hidden[picked], None if adapters is None else adapters[picked]
        return self._parts.model.logits(hidden, None, adapters)
