"""What all steps of a rank work with: the model, its caches, and places for results.

Below are the functions of the device that every way to run a step calls.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.speculate.acceptance import Branch, Branched, Claims, fronts, settle
from ds_runtime.engine.step.inputs import Added, Frame, StepInputs
from ds_runtime.engine.step.result import Handle
from ds_runtime.engine.step.sampler import Draws, Sampler
from ds_runtime.engine.step.transfer import PageTable, Upload
from ds_runtime.model.base import LanguageModel
from ds_runtime.model.draft import DraftModel
from ds_runtime.ops.batch import Batch, Limits, RowOrder
from ds_runtime.ops.contracts.caches import Caches
from ds_runtime.parallel.exchange import RowExchange
from ds_runtime.parallel.sums.halves import Halves


@dataclass(slots=True)
class Parts:
    """Of one rank. kernels: those that have states, by their keys; states: of steps op by op.
    caches: of the model and of the draft layer. branched: how drafts hang
    together, if not as chains. limits: of the largest step. spare_page: a page of the caches that
    is nobody's. adapts: rows may have adapters. leads: results are collected here. simulated: the
    probability with which each draft is taken for right, instead of judging it. halves: which
    steps run as two.
    """

    model: LanguageModel
    draft: DraftModel | None
    sampler: Sampler
    inputs: StepInputs
    kernels: Mapping[str, Any]
    states: dict[str, Any]
    caches: Caches
    shape: Speculation | None
    branched: Branched | None
    limits: Limits
    spare_page: int
    vocab: int
    device: torch.device
    adapts: bool = False
    leads: bool = True
    simulated: float | None = None
    halves: Halves | None = None
    tables: dict[int, PageTable] = field(default_factory=dict)

    @property
    def last_tokens(self) -> Tensor:
        """[rows · width] int64: see StepInputs."""
        return self.inputs.last_tokens

    @property
    def width(self) -> int:
        """Tokens per row of `last_tokens`."""
        return self.inputs.width

    @property
    def exchange(self) -> RowExchange:
        """How rows reach other ranks: attention is of this rank's alone, and logits are of all."""
        return self.model.exchange

    def frame(
        self, size: int, queries: int, keys: Container[str] | None = None, adapts: bool = False
    ) -> Frame:
        """Places for a captured step; keys: of the states that it needs (default: all). After a
        sequence that fills its context, spare tokens of a verification stand in a page of their
        own.
        """
        limits = self.limits
        spare = -(-(limits.max_queries - 1) // limits.page_size)
        pages, each = limits.max_pages_per_sequence + spare, min(queries, limits.max_queries)
        if size not in self.tables:
            self.tables[size] = PageTable(size, pages, self.spare_page, self.device)
        bounds = replace(
            limits,
            max_tokens=size * queries,
            max_sequences=size * queries // each,
            max_pages_per_sequence=pages,
            max_queries=each,
        )
        states = {
            key: kernel.state(bounds)
            for key, kernel in self.kernels.items()
            if keys is None or key in keys
        }
        return Frame(size, queries, self.tables[size], states, adapts)

    def batch(self, added: Added, sent: Upload, order: RowOrder | None) -> Batch:
        """A step whose arrays were sent, with its kernels told; in front of a replay only those
        that do not prepare within it.
        """
        frame = added.frame
        batch = added.batch(sent, self.states if frame is None else frame.states)
        batch.order = order
        self.prepare(batch, inside=None if frame is None else False)
        return batch

    def prepare(
        self, batch: Batch, keys: Container[str] | None = None, inside: bool | None = None
    ) -> None:
        """Tell the kernels of a step; keys: of those alone. inside: of a captured step those that
        prepare on the device, within its recording, each of which must run in there; or else, in
        front of every replay, the others.
        """
        for key, state in batch.states.items():
            kernel = self.kernels[key]
            own = inside in (None, getattr(kernel, "prepares_on_device", False))
            if own and (keys is None or key in keys):
                kernel.prepare(state, batch)


@dataclass(frozen=True, slots=True)
class Results:
    """Where captured steps leave their results, each in as many rows as it has. Of the largest
    verification: hidden states [own rows, hidden], logits [rows, vocab] float32 and finite [rows]
    bool, whether these are numbers. Of the draft layer tail [own sequences, hidden] and tail_logits
    [sequences, vocab]. All are overwritten by the next step.
    """

    hidden: Tensor
    logits: Tensor
    finite: Tensor
    tail: Tensor
    tail_logits: Tensor

    @staticmethod
    def of(parts: Parts, size: int, queries: int) -> Results:
        def made(rows: int, columns: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(rows, columns, dtype=kind, device=parts.device)

        width, dtype, every = (
            parts.model.config.hidden,
            parts.model.dtype,
            size * parts.exchange.groups,
        )
        topk, drafts = 1 if parts.shape is None else parts.shape.topk, parts.draft is not None
        return Results(
            hidden=made(size * queries * drafts, width, dtype),
            logits=made(every * max(queries, topk), parts.vocab, torch.float32),
            finite=torch.ones(every * queries, dtype=torch.bool, device=parts.device),
            tail=made(size * drafts, width, dtype),
            tail_logits=made(every * drafts, parts.vocab, torch.float32),
        )


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
        front = fronts(claims, last_tokens, parts.branched, sent)
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
