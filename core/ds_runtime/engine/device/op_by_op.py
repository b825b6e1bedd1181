"""Any step, op by op: what a captured one does, of as many rows as there are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ds_runtime.engine.capture.prefill import PrefillGraphs
from ds_runtime.engine.device.parts import Parts, draw, move
from ds_runtime.engine.speculate.acceptance import Branch, came_from, claim
from ds_runtime.engine.speculate.chain import Chain, Drafting, Rest
from ds_runtime.engine.speculate.follow import Own, cut_to_branches, follow
from ds_runtime.engine.speculate.tree import Tree
from ds_runtime.engine.step.inputs import read_last_tokens
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.result import SCORE_ROWS, Handle, finite_rows
from ds_runtime.engine.step.transfer import Upload, put
from ds_runtime.ops.batch import Batch


class OpByOp:
    """Steps of a rank's works, whatever they are. prefills: captured pieces of steps with prompts,
    between whose attentions they run.
    """

    def __init__(self, parts: Parts, prefills: PrefillGraphs | None = None) -> None:
        self._parts = parts
        self.prefills = prefills

    def run(self, handle: Handle) -> Rest | None:
        """Launch a step; what is left to be done once the host knows what was kept."""
        parts, plan, sent = self._parts, handle.plan, Upload(self._parts.device)
        works, prompts = plan.works, any(w.tokens is not None for w in plan.works)
        # Without any of these it decodes as without a draft layer.
        speculates = parts.draft is not None and bool(
            plan.drafts or prompts or any(w.length > 1 for w in works)
        )
        wanted = handle.sort(parts.sampler)
        draws, claims = parts.sampler.prepare(wanted.draws, sent), None
        if speculates:
            claims = claim(plan, wanted, parts.width, sent, parts.simulated)
            own = Own.of(works, parts, sent)
        order = parts.exchange.order(works, sent)
        added = parts.inputs.add(parts.exchange.own(works), sent, trees=parts.trees)
        sent.send()
        batch = parts.batch(added, sent, order())
        drawn = sum(w.length for w in parts.exchange.own(works) if w.tokens is None)
        read_last_tokens(batch, parts.last_tokens, drawn)
        found = self._forward(batch, prompts, speculates)
        hidden = found  # [logit rows, hidden]
        if speculates:
            hidden = parts.exchange.collect(found[batch.logit_rows], batch.order)
        assert hidden.shape[0] == wanted.rows, f"{hidden.shape[0]} rows, {wanted.rows} are due"
        adapters, branch = parts.exchange.logit_adapters(batch), None
        if wanted.draws:
            logits = self._logits(hidden, adapters, wanted.draw_rows)
            handle.finite = [finite_rows(logits)]
            branch = draw(parts, handle, draws, logits, sent, claims)
            del logits
        self._score(handle, hidden, adapters)
        if not speculates:
            return None
        rows = sent[own.rows]
        if branch is not None and branch.order is not None:
            rows = own.drawn.back(rows, len(wanted.draws))
            if batch.decode is not None:
                move(parts, batch, branch, rows, own.works)
        if not (plan.drafts or prompts):
            return None
        ids = sent[own.ids].clone()
        if handle.tokens:
            ids.index_copy_(0, sent[own.rows], own.drawn(handle.tokens[0]))
        return self._follow(handle, batch, found, ids, (own, sent, rows), branch)

    def _follow(
        self,
        handle: Handle,
        batch: Batch,
        hidden: Tensor,
        ids: Tensor,
        which: tuple[Own, Upload, Tensor],
        branch: Branch | None,
    ) -> Rest | None:
        """The draft layer's run over the step's tokens. ids: [T] what follows each."""
        parts, plan, (own, sent, rows) = self._parts, handle.plan, which
        accepted = ids[:0] if branch is None else branch.accepted
        drafts = bool(plan.drafts and handle.wanted.samplers)
        drafting = Drafting(parts, handle, accepted) if drafts else None
        if branch is not None and branch.order is not None:
            came = came_from(branch, rows, batch.num_tokens, own.drawn)
            batch, takes, own, sent = self._branches(plan.works)
            ids, hidden = ids[takes], hidden[came[takes]]
        last = sent[own.firsts]
        if branch is not None:
            last = last + own.works(accepted)
        tail = own.tail()
        found, logits = follow(parts, batch, hidden, ids, last, tail, drafts)
        if drafting is None or logits is None:
            return None
        behind = Chain(parts, plan.drafts) if parts.trees is None else Tree(parts)
        return drafting.rest(behind, found, logits, tail)

    def _branches(self, works: Sequence[Work]) -> tuple[Batch, Tensor, Own, Upload]:
        """The step as if each tree had been a chain, which its branch begins with: its batch and
        the rows of the step that it takes.
        """
        parts, sent = self._parts, Upload(self._parts.device)
        assert parts.shape is not None
        cut, _ = cut_to_branches(works, parts.shape.steps + 1)
        _, rows = cut_to_branches(parts.exchange.own(works), parts.shape.steps + 1)
        own, takes = Own.of(cut, parts, sent), sent.add(np.array(rows, np.int64))
        order = parts.exchange.order(cut, sent)
        added = parts.inputs.add(parts.exchange.own(cut), sent)
        sent.send()
        return parts.batch(added, sent, order()), sent[takes], own, sent

    def _forward(self, batch: Batch, prompts: bool, every: bool) -> Tensor:
        """As of the model."""
        graph, parts = None, self._parts
        if self.prefills is not None and prompts:
            graph = self.prefills.graph_for(parts.exchange.most(batch.num_tokens, batch.order))
        if graph is None:
            return parts.model.forward(batch, parts.caches, every)
        return graph.replay(batch, every)

    def _logits(self, hidden: Tensor, adapters: Tensor | None, rows: list[int]) -> Tensor:
        """Of some of the logit rows."""
        if len(rows) < hidden.shape[0]:  # rows are distinct and rising
            picked = put(rows, np.int64, self._parts.device)
            hidden, adapters = hidden[picked], None if adapters is None else adapters[picked]
        return self._parts.model.logits(hidden, None, adapters)

    def _score(self, handle: Handle, hidden: Tensor, adapters: Tensor | None) -> None:
        """Of the tokens of prompts, as they are asked for."""
        wanted = handle.wanted
        for first in range(0, len(wanted.scores), SCORE_ROWS):
            some = slice(first, first + SCORE_ROWS)
            logits = self._logits(hidden, adapters, wanted.score_rows[some])
            handle.scores.append(self._parts.sampler.score(logits, wanted.scores[some]))
            handle.scored.append(finite_rows(logits))
            del logits  # before the next slice's
