"""Drafts behind what a step has sampled: one run of the draft layer over the step's own tokens,
then one per further draft.

The host waits once in between, for how many drafts of the last step were right. By then the draft
layer's first run is queued, and the runs after it hide what the host does until the next step.
Behind a captured verification it first goes on with what the step before brought, while the device
verifies.
Drafts are drawn with the very random numbers with which the model will draw these positions, so
that they are often right also where requests sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.speculate.acceptance import Branch
from ds_runtime.engine.speculate.chain import JudgeGraph
from ds_runtime.engine.speculate.programs import Cycles
from ds_runtime.engine.speculate.tree import Growth, Trees
from ds_runtime.engine.speculate.tree_phases import level_runs
from ds_runtime.engine.speculate.verification import VerifyGraph
from ds_runtime.engine.step.inputs import Inputs, Run
from ds_runtime.engine.step.masked_draw import placed
from ds_runtime.engine.step.plan import StepPlan, Work
from ds_runtime.engine.step.result import Handle
from ds_runtime.engine.step.row_order import Spreading
from ds_runtime.engine.step.sampler import Draw, Draws, Sampler
from ds_runtime.engine.step.transfer import Download, Upload, put
from ds_runtime.model.draft import DraftModel
from ds_runtime.ops.batch import Batch, Spread
from ds_runtime.ops.binding.bound import BoundOps


@dataclass(frozen=True, slots=True)
class Follow:
    """What the draft layer's first run needs beside the step's batch: numbers in its upload.

    ids: [T] the token behind each, where the host knows it. draws: [draws] rows behind which one
    was drawn. firsts: [n] the row of each work's first draw. Where ranks have sequences of their
    own, all these are of this rank's works; drawn and own are which draws and which sampling works
    of the step these are, and tail is how the latter lie on the ranks.
    """

    ids: int
    draws: int
    firsts: int
    drawn: int
    own: int
    mine: tuple[int, ...]
    tail: Spreading | None = None

    def of(self, sent: Upload, tokens: Tensor) -> Tensor:
        """This rank's of a tensor of all sampling works."""
        return tokens if self.tail is None else tokens[sent[self.own]]


class Speculator:
    """The draft layer of one rank at work. part: this rank, of so many that have sequences of
    their own.
    """

    def __init__(
        self,
        draft: DraftModel,
        shape: Speculation,
        bound: BoundOps,
        states: dict[str, Any],
        sampler: Sampler,
        last_tokens: Tensor,
        trees: Trees | None,
        inputs: Inputs,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.draft = draft
        self.shape = shape
        self._kernels = bound.stateful
        self._states = states
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._rows = last_tokens.view(-1, shape.tokens)
        self._trees = trees
        self._inputs = inputs
        self._rank, self._ranks = part

    def follow(self, plan: StepPlan, upload: Upload) -> Follow:
        """Add to a step's upload, before it is sent."""
        known: list[int] = []
        draws: list[int] = []
        firsts: list[int] = []
        drawn: list[int] = []
        own: list[int] = []
        samplers = list[Work]()
        draw = 0
        for work in plan.works:
            begin, draw = draw, draw + work.draws
            if work.draws:
                samplers.append(work)
            if self._ranks > 1 and work.rank != self._rank:
                continue
            if work.draws:
                firsts.append(len(known) + work.length - work.draws)
                draws += range(firsts[-1], len(known) + work.length)
                drawn += range(begin, draw)
                own.append(len(samplers) - 1)
            known += [0] if work.tokens is None else work.tokens[1:]
            known += [0] * (work.length - 1) if work.tokens is None else [work.next_token or 0]
        tail = None
        if self._ranks > 1:
            ends = [
                Work(rid="", row=w.row, rank=w.rank, start=0, length=1, pages=[]) for w in samplers
            ]
            tail = Spreading.of(ends, self._ranks, upload)
        return Follow(
            ids=upload.add(np.array(known, np.int64)),
            draws=upload.add(np.array(draws, np.int64)),
            firsts=upload.add(np.array(firsts, np.int64)),
            drawn=upload.add(np.array(drawn, np.int64)),
            own=upload.add(np.array(own, np.int64)),
            mine=tuple(own),
            tail=tail,
        )

    def run(
        self,
        handle: Handle,
        follow: Follow,
        batch: Batch,
        hidden: Tensor,
        branch: Branch | None,
        sent: Upload,
        caches: Sequence[Tensor],
    ) -> None:
        """Write the step's tokens to the draft layer's caches, and drafts to the rows' places.

        hidden: [T, hidden] of the model. branch: what was kept of each sampling work's drafts.
        """
        tokens = handle.tokens[0] if handle.tokens else None
        accepted = torch.zeros(0, dtype=torch.int64, device=hidden.device)
        if branch is not None:
            accepted = branch.accepted
        arriving = Download([accepted])
        if branch is not None and branch.order is not None:
            assert tokens is not None
            follow, batch, sent, hidden, tokens = self._branches(handle, branch, hidden, tokens)
        ids = sent[follow.ids].clone()
        if tokens is not None:
            drawn = tokens if follow.tail is None else tokens[sent[follow.drawn]]
            ids.index_copy_(0, sent[follow.draws], drawn)
        last = sent[follow.firsts] + (accepted if branch is None else follow.of(sent, accepted))
        tail = None if follow.tail is None else follow.tail.sent(sent)
        hidden = self.draft.forward(batch, hidden, ids, caches, last, tail)  # [n, hidden]
        if not (handle.wanted.samplers and handle.plan.drafts):
            return
        right = arriving.wait()[0].tolist()
        if self._trees is None:
            self._chain(handle, hidden, right, caches, follow, sent, tail)
        else:
            self._tree(handle, hidden, right, caches)

    def judge(
        self,
        handle: Handle,
        judge: JudgeGraph,
        verified: VerifyGraph,
        logits: Tensor,
        simulated: float | None,
    ) -> Tensor:
        """The draws of a step behind captured chains, and how many drafts of each work they keep:
        [works] int64. logits: of all rows. simulated: as in `verify.claim`.
        """
        sampler, works, wanted = self._sampler, handle.plan.works, handle.wanted.draws
        lies, rows = verified.lies(works), judge.size * judge.queries
        whole = len(lies) == judge.queries * len(works)  # then all lie together
        if sampler.plain(wanted):
            judge.send(works, sampler.settings(placed(wanted, lies, rows), rows), simulated)
            judge.draw()
            drawn = judge.drawn
            if whole:
                tokens, finite = (t[: len(lies)].clone() for t in (drawn, verified.finite))
            else:
                at = put(lies, np.int64, drawn.device)
                tokens, finite = drawn[at], verified.finite[at]
        else:
            sent, counts = Upload(logits.device), np.array([w.length for w in works], np.int64)
            draws, places = sampler.prepare(wanted, sent), sent.add(lies)
            firsts = sent.add(np.cumsum(counts) - counts)
            sent.send(verified.behind)
            judge.send(works, sampler.settings((), rows), simulated)
            at, fronts = sent[places], self._last_tokens[verified.inputs]
            logits, finite = logits[: len(lies)] if whole else logits[at], verified.finite[at]
            tokens = sampler.draw(logits, draws, sent, fronts[at])
            judge.drawn.index_copy_(0, at, tokens)
            judge.judge()
            along = torch.arange(judge.queries, device=logits.device)
            along = torch.minimum(along, judge.accepted[: len(works)].unsqueeze(1))
            sampler.count(draws, tokens, sent, sent[firsts].unsqueeze(1) + along)
            handle.logprobs = sampler.logprobs(logits, draws, tokens)
        handle.tokens, handle.finite = [tokens], [finite]
        accepted = judge.accepted[: len(works)].clone()  # before the next step's
        if judge.queries > 1:
            handle.accepted = [accepted]
        return accepted

    def replay(
        self,
        handle: Handle,
        accepted: Tensor,
        follow: Callable[[], None],
        cycles: Cycles,
        collects: bool,
    ) -> Callable[[], None]:
        """As `run`, behind a captured verification, up to where the host has to wait; what is left
        to be done. accepted: [works] drafts that were right; follow: the draft layer's run over the
        step's own tokens.
        """
        arriving = Download([accepted])
        tells = any(w.tell_drafts for w in handle.plan.works)
        if collects and not tells:  # what was drawn is on its way while drafts are made
            handle.download()
        follow()

        def rest() -> None:
            works, ends = self._ends(handle, arriving.wait()[0].tolist())
            drafting = cycles.drafting(len(works), handle.plan.drafts)
            assert drafting is not None, "a step drafts as many as were planned"
            handle.drafts = drafting.replay(works, ends, tells)

        return rest

    def _branches(
        self, handle: Handle, branch: Branch, hidden: Tensor, tokens: Tensor
    ) -> tuple[Follow, Batch, Upload, Tensor, Tensor]:
        """The step as if each tree had been a chain of as many tokens as a branch can have, which
        its branch begins with: what `run` needs of it.
        """
        assert branch.order is not None
        plan, most = handle.plan, self.shape.steps + 1
        works, rows, draws = [], list[int](), list[int]()
        row = draw = 0
        for work in plan.works:
            length = min(work.length, most) if work.tokens is None else work.length
            works.append(msgspec.structs.replace(work, length=length))
            rows += range(row, row + length)
            draws += range(draw, draw + works[-1].draws)
            row, draw = row + work.length, draw + work.draws
        chains = msgspec.structs.replace(plan, works=works)
        sent = Upload(hidden.device)
        follow = self.follow(chains, sent)
        places, drawn = (sent.add(np.array(x, np.int64)) for x in (rows, draws))
        added = self._inputs.add(chains.works, sent)
        sent.send()
        batch = added.batch(sent, self._states)
        for key, kernel in self._kernels.items():
            kernel.prepare(self._states[key], batch)
        order = torch.arange(row, device=hidden.device)  # decode rows are the first draws
        count = sum(w.length for w in plan.works if w.tokens is None)
        order[:count] = branch.order[:count]
        return follow, batch, sent, hidden[order[sent[places]]], tokens[sent[drawn]]

    def _ends(self, handle: Handle, accepted: list[int]) -> tuple[list[Work], list[int]]:
        """The sampling works, and the position of the last kept token in front of each one's."""
        works = [handle.plan.works[i] for i, _ in handle.wanted.samplers]
        return works, [
            w.start + w.length - w.draws + right for w, right in zip(works, accepted, strict=True)
        ]

    def _chain(
        self,
        handle: Handle,
        hidden: Tensor,
        accepted: list[int],
        caches: Sequence[Tensor],
        follow: Follow,
        sent: Upload,
        tail: Spread | None,
    ) -> None:
        """Draft behind the last kept token of each sampling work, one token after the other."""
        plan = handle.plan
        works, ends = self._ends(handle, accepted)
        upload = Upload(self._rows.device)
        own = follow.mine if tail is not None else range(len(works))
        ours = [works[i] for i in own]
        runs = [Run([ends[i] + s for i in own]) for s in range(1, plan.drafts)]
        chain = [self._inputs.add(ours, upload, run=run) for run in runs]
        draws = [
            self._sampler.prepare(
                [Draw(w.row, e + 2 + s) for w, e in zip(works, ends, strict=True)], upload
            )
            for s in range(plan.drafts)
        ]
        upload.send()
        found = [self._draw(hidden, draws[0], upload, tail)]
        key = self.draft.state_key
        for step, some in zip(chain, draws[1:], strict=True):
            ids = follow.of(sent, found[-1])
            batch = step.batch(upload, self._states)
            batch.spread = tail
            if key:
                self._kernels[key].prepare(self._states[key], batch)
            hidden = self.draft.forward(batch, hidden, ids, caches, None)
            found.append(self._draw(hidden, some, upload, tail))
        drafts = torch.stack(found, dim=1)  # [n, drafts]
        places = self._rows[:, 1 : 1 + plan.drafts]
        places.index_copy_(0, upload[draws[0].rows], drafts)
        if any(w.tell_drafts for w in works):
            handle.drafts = [drafts]

    def _tree(
        self, handle: Handle, hidden: Tensor, accepted: list[int], caches: Sequence[Tensor]
    ) -> None:
        """Draft a tree behind the last kept token of each sampling work, level by level."""
        shape, trees = self.shape, self._trees
        assert trees is not None
        works, ends = self._ends(handle, accepted)
        upload = Upload(self._rows.device)
        rows = upload.add(np.array([w.row for w in works], np.int64))
        runs, fits = level_runs(shape, works, ends, self._inputs)
        levels = [self._inputs.add(works, upload, run=run) for run in runs]
        blind = upload.add(np.repeat(fits - 1, shape.topk))
        upload.send()
        growth = Growth.begin(shape, *self._best(hidden))
        hidden = hidden.repeat_interleave(shape.topk, dim=0)  # in front of every row
        key = self.draft.tree_key
        for level, step in enumerate(levels, 1):
            batch = step.batch(upload, self._states, growth.seen(level) | upload[blind])
            if key:
                self._kernels[key].prepare(self._states[key], batch)
            ids = growth.frontier_tokens().flatten()
            hidden = self.draft.forward(batch, hidden, ids, caches, None)
            hidden = growth.grow(*self._best(hidden), hidden)
        drafted = growth.best()
        self._rows[:, 1:].index_copy_(0, upload[rows], drafted.tokens)
        trees.put(upload[rows], drafted)
        if any(w.tell_drafts for w in works):
            handle.drafts = [drafted.tokens, drafted.parents]

    def _best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the likeliest continuations: [rows, topk] each."""
        none = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        logits = self.draft.logits(hidden)
        _, values, ids = self._sampler.ops.logprobs(logits, none, self.shape.topk)
        return values, ids

    def _draw(
        self, hidden: Tensor, draws: Draws, sent: Upload, tail: Spread | None = None
    ) -> Tensor:
        hidden = self.draft.model.wanted(hidden, tail)
        return self._sampler.choose(self.draft.logits(hidden), draws, sent)
