"""Drafts behind what a step has sampled: one run of the draft layer over the step's own tokens,
then one per further draft.

The host waits once in between, for how many drafts of the last step were right. By then the draft
layer's first run is queued, and the runs after it hide what the host does until the next step.
Drafts are drawn with the very random numbers with which the model will draw these positions, so
that they are often right also where requests sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_runtime.engine.handle import Handle
from ds_runtime.engine.sampler import Draw, Draws, Sampler
from ds_runtime.engine.step import Work
from ds_runtime.engine.transfer import Download, Upload
from ds_runtime.model.draft import DraftModel
from ds_runtime.ops.batch import Batch, DecodePart
from ds_runtime.ops.bound import BoundOps


@dataclass(frozen=True, slots=True)
class Follow:
    """What the draft layer's first run needs beside the step's batch: numbers in its upload.

    ids: [T] the token behind each, where the host knows it. draws: [draws] rows behind which one
    was drawn. firsts: [n] the row of each work's first draw.
    """

    ids: int
    draws: int
    firsts: int


class Speculator:
    """The draft layer of one rank at work. width: tokens per row of last_tokens."""

    def __init__(
        self,
        draft: DraftModel,
        bound: BoundOps,
        states: dict[str, Any],
        sampler: Sampler,
        last_tokens: Tensor,
        width: int,
        context_length: int,
    ) -> None:
        self.draft = draft
        self.width = width
        self._kernel = bound.stateful[draft.state_key]
        self._states = states
        self._sampler = sampler
        self._rows = last_tokens.view(-1, width)
        self._page_size = bound.base.page_size
        self._context_length = context_length

    def follow(self, handle: Handle, upload: Upload) -> Follow:
        """Add to a step's upload, before it is sent."""
        known: list[int] = []
        draws: list[int] = []
        firsts: list[int] = []
        for work in handle.plan.works:
            if work.draws:
                firsts.append(len(known) + work.length - work.draws)
                draws += range(firsts[-1], len(known) + work.length)
            known += [0] if work.tokens is None else work.tokens[1:]
            known += [0] * (work.length - 1) if work.tokens is None else [work.next_token or 0]
        return Follow(*(upload.add(np.array(x, np.int64)) for x in (known, draws, firsts)))

    def run(
        self,
        handle: Handle,
        follow: Follow,
        batch: Batch,
        hidden: Tensor,
        accepted: Tensor,
        sent: Upload,
        cache: Tensor,
    ) -> None:
        """Write the step's tokens to the draft layer's cache, and drafts to the rows' places.

        hidden: [T, hidden] of the model. accepted: [n] drafts that were right, per sampling work.
        """
        arriving = Download([accepted])
        ids = sent[follow.ids].clone()
        if handle.tokens:
            ids.index_copy_(0, sent[follow.draws], handle.tokens[0])
        last = sent[follow.firsts] + accepted
        hidden = self.draft.forward(batch, hidden, ids, cache, last)  # [n, hidden]
        if handle.wanted.samplers:
            self._chain(handle, hidden, arriving.wait()[0].tolist(), cache)

    def _chain(self, handle: Handle, hidden: Tensor, accepted: list[int], cache: Tensor) -> None:
        """Draft behind the last kept token of each sampling work, one token after the other."""
        plan = handle.plan
        works = [plan.works[i] for i, _ in handle.wanted.samplers]
        ends = [
            w.start + w.length - w.draws + right for w, right in zip(works, accepted, strict=True)
        ]
        upload = Upload(self._rows.device)
        chain = self._steps(works, ends, plan.drafts, upload)
        draws = [
            self._sampler.prepare(
                [Draw(w.row, e + 2 + s) for w, e in zip(works, ends, strict=True)], upload
            )
            for s in range(plan.drafts)
        ]
        upload.send()
        found = [self._draw(hidden, draws[0], upload)]
        for step, some in zip(chain, draws[1:], strict=True):
            batch = step.batch(upload, found[-1], self._states)
            self._kernel.prepare(self._states[self.draft.state_key], batch)
            hidden = self.draft.forward(batch, hidden, found[-1], cache, None)
            found.append(self._draw(hidden, some, upload))
        drafts = torch.stack(found, dim=1)  # [n, drafts]
        places = self._rows[:, 1 : 1 + plan.drafts]
        places.index_copy_(0, upload[draws[0].rows], drafts)
        if any(w.tell_drafts for w in works):
            handle.drafts = [drafts]

    def _draw(self, hidden: Tensor, draws: Draws, sent: Upload) -> Tensor:
        return self._sampler.choose(self.draft.logits(hidden), draws, sent)

    def _steps(
        self, works: Sequence[Work], ends: Sequence[int], drafts: int, upload: Upload
    ) -> list[_Step]:
        """The runs behind the first. Where a sequence has no page left, nothing is written."""
        size = self._page_size
        room = [min(len(w.pages) * size, self._context_length) for w in works]
        width = max(len(w.pages) for w in works)
        filled = [w.pages + w.pages[:1] * (width - len(w.pages)) for w in works]
        table = upload.add(np.array(filled, np.int32))
        found = []
        for s in range(1, drafts):
            at = [min(e + s, r - 1) for e, r in zip(ends, room, strict=True)]
            slots = [
                w.pages[p // size] * size + p % size if p == e + s else -1
                for w, p, e in zip(works, at, ends, strict=True)
            ]
            lens = tuple(p + 1 for p in at)
            found.append(
                _Step(
                    table,
                    upload.add(np.array(at, np.int64)),
                    upload.add(np.array(slots, np.int64)),
                    upload.add(np.array(lens, np.int32)),
                    lens,
                )
            )
        return found


@dataclass(frozen=True, slots=True)
class _Step:
    """One run of the draft layer with a token per sequence: numbers in an upload."""

    table: int
    positions: int
    slots: int
    kv_lens: int
    host_kv_lens: tuple[int, ...]

    def batch(self, sent: Upload, ids: Tensor, states: dict[str, Any]) -> Batch:
        return Batch(
            input_ids=ids,
            positions=sent[self.positions],
            slots=sent[self.slots],
            logit_rows=sent[self.positions],
            decode=DecodePart(sent[self.table], sent[self.kv_lens], self.host_kv_lens),
            states=states,
        )
