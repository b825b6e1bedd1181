"""Functions of the device that every way to run a step calls: what it draws, and what it drafts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ds_runtime.engine.device.parts import Parts
from ds_runtime.engine.speculate.acceptance import Branch, Claims, fronts, moves, settle
from ds_runtime.engine.speculate.chain import Chain
from ds_runtime.engine.speculate.tree import Tree
from ds_runtime.engine.step.result import Handle
from ds_runtime.engine.step.sampler import Draws
from ds_runtime.engine.step.transfer import Download, Upload
from ds_runtime.ops.batch import Batch, RowOrder
from ds_runtime.parallel.exchange import Pick

Rest = Callable[[], None]
"""What is left of a step once the host knows which drafts were right."""


def draw(
    parts: Parts,
    handle: Handle,
    draws: Draws,
    logits: Tensor,
    sent: Upload,
    claims: Claims | None = None,
) -> Branch | None:
    """Draw the step's tokens; which drafts of each work were right, if it drafts. That logits are
    `handle.finite` has been seen.
    """
    sampler, last_tokens = parts.sampler, parts.last_tokens
    front, branch, kept, order = None, None, None, None
    if claims is not None:
        front = fronts(claims, last_tokens, parts.trees, sent)
    known, nodes = (None, None) if front is None else (front.tokens, front.nodes)
    drawn = sampler.draw(logits, draws, sent, known, nodes)
    if claims is None:
        place = sent[draws.rows]
        place = place if parts.width == 1 else place * parts.width
        last_tokens.index_copy_(0, place, drawn)
    else:
        assert parts.shape is not None
        branch = settle(claims, parts.shape.steps + 1, drawn, front, last_tokens, sent)
        if front is not None:
            handle.accepted, order, kept = [branch.accepted], branch.order, branch.draws
    sampler.count(draws, drawn, sent, kept)
    handle.tokens = [drawn if order is None else drawn[order]]
    if order is not None:
        handle.finite = [some[order] for some in handle.finite]
    handle.logprobs = sampler.logprobs(logits, draws, drawn, order)
    return branch


def move(parts: Parts, batch: Batch, branch: Branch, rows: Tensor, own: Pick) -> None:
    """Bring the kept branches of this rank's trees to the front of the caches. batch: the step that
    verified them; rows: [draws] the row of each draw; own: of the sampling works.
    """
    mine = Branch(own(branch.accepted), own(branch.draws))
    parts.model.move(parts.layers, batch, moves(mine, batch.slots[rows], rows))


class Drafting:
    """Drafts behind a step, from construction on, where what was kept starts for the host."""

    def __init__(self, parts: Parts, handle: Handle, accepted: Tensor) -> None:
        """accepted: [sampling works] drafts that were right."""
        self._parts, self._handle = parts, handle
        self._arriving = Download([accepted])
        self._tells = any(w.tell_drafts for w in handle.plan.works)
        if parts.leads and not self._tells:  # what was drawn is on its way while drafts are made
            handle.download()

    def rest(
        self, drafting: Chain | Tree, tail: Tensor, logits: Tensor, order: RowOrder | None
    ) -> Rest:
        """What is left. tail, logits: of the draft layer's first run; order: of the rows that the
        sampling works have there.
        """
        handle, arriving, tells = self._handle, self._arriving, self._tells

        def rest() -> None:
            works = [handle.plan.works[i] for i, _ in handle.wanted.samplers]
            accepted = arriving.wait()[0].tolist()
            ends = [
                w.start + w.length - w.draws + right
                for w, right in zip(works, accepted, strict=True)
            ]
            handle.drafts = drafting.run(works, ends, tells, tail, logits, order)

        return rest
