"""Trees of drafts after what a step has kept.

Every level is a phase of its own: kernels are told between two of them what the next one's rows
see, which the device alone knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.capture.recorder import Phase, Recorder, given_up
from ds_runtime.engine.device.parts import Parts, Results
from ds_runtime.engine.speculate.chain import Drafts, KeptTokens
from ds_runtime.engine.step.inputs import DraftRun, StepInputs
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.engine.trees.growth import Growth
from ds_runtime.engine.trees.nodes import Drafted, Trees
from ds_runtime.parallel.exchange import Pending


def _level_runs(
    shape: Speculation, works: Sequence[Work], ends: Sequence[int], inputs: StepInputs
) -> tuple[list[DraftRun], npt.NDArray[np.int64]]:
    """The draft layer's runs behind its first, with topk rows per sequence; a level's keys lie
    behind those of the level before. A sequence without pages for all of them writes none, and its
    rows see all that lies before; the others' are the ones of the second result, [works].
    """
    topk, last = shape.topk, inputs.context - 1
    needed = (shape.steps - 1) * topk
    fits = [
        e + 1 + needed <= len(w.pages) * inputs.page_size for w, e in zip(works, ends, strict=True)
    ]
    runs = [
        DraftRun(
            [e + 1 + (level - 1) * topk for e in ends],
            topk,
            [min(e + level, last) for e in ends],
            [e + 1 + level * topk * fit for e, fit in zip(ends, fits, strict=True)],
        )
        for level in range(1, shape.steps)
    ]
    return runs, np.array(fits, np.int64)


class Tree(Drafts):
    """Trees of drafts after what a step has kept, into their rows' places."""

    def __init__(self, parts: Parts, size: int = 0) -> None:
        assert parts.draft is not None and parts.shape is not None
        assert isinstance(parts.branched, Trees)
        self._shape, self._trees = parts.shape, parts.branched
        runs, topk = parts.shape.steps - 1, parts.shape.topk
        super().__init__(parts, size, runs, topk, parts.draft.tree_key)
        self._mine = parts.exchange.section(size)
        self._out: Tensor | None = None
        self._grown: list[tuple[Growth, Tensor]] = []  # behind each level, with `hidden` in front
        self._drafted: Drafted | None = None
        self._runs = self._phases()

    def _phases(self) -> list[Phase]:
        return [partial(self._phase, level) for level in range(self._shape.steps)]

    def capture(self, recorder: Recorder, results: Results, what: str) -> None:
        """Level by level; what a recording leaves for the next is there once it was replayed."""
        self._out = results.logits[: self.size * self._parts.exchange.groups * self._shape.topk]
        self._load(self._dummies(results))
        for level, phase in enumerate(self._runs):
            self._front(level)
            self._runs[level] = recorder.record(phase, what)
            self._runs[level]()

    def run(self, kept: KeptTokens, tell: bool) -> list[Tensor]:
        self._load(kept)
        if any(map(given_up, self._runs)):  # a recording reads what the one before it made
            self._runs = self._phases()
        for level, run in enumerate(self._runs):
            self._front(level)
            run()
        found = self._drafted
        assert found is not None
        return [self._told(x, kept.works) for x in (found.tokens, found.parents)] if tell else []

    def _load(self, kept: KeptTokens) -> None:
        """Rows, each level's batch, and which rows see all there is. The page table is there: the
        step has verified these works.
        """
        works, ends, parts, topk = kept.works, kept.ends, self._parts, self._shape.topk
        sent = Upload(parts.device)
        own = parts.exchange.numbers(works)
        mine = [works[i] for i in own]
        runs, fits = _level_runs(self._shape, mine, [ends[i] for i in own], parts.inputs)
        added = [
            parts.inputs.add(mine, sent, frame, run=run)
            for frame, run in zip(self._frames, runs, strict=True)
        ]
        blind = np.full(self.size or len(own), -1, np.int64)
        blind[: len(own)] = fits - 1
        rows_, blind_ = sent.add(self._rows_of(works)), sent.add(np.repeat(blind, topk))
        order: Pending = partial(parts.exchange.even, self.size * topk)
        if not self.size:
            order = parts.exchange.each(works, topk, sent)
            self._mine = parts.exchange.pick(own, sent)
        sent.send(self._buffer)
        self._rows, self._blind = sent[rows_], sent[blind_]
        self._tail, self._logits = kept.tail, kept.logits
        self._now = self._take(added, sent)
        for batch in self._now:
            batch.order = order()

    def _front(self, level: int) -> None:
        """Tell the kernels of a captured level's run, if it has one, in front of it."""
        if level and self.size:
            self._parts.prepare(self._now[level - 1], inside=False)

    def _phase(self, level: int) -> None:
        growth, hidden = self._grow(level)
        del self._grown[level:]
        self._grown.append((growth, hidden))
        if level + 1 == self._shape.steps:
            self._drafted = drafted = growth.best()
            parts = self._parts
            places = parts.last_tokens.view(-1, parts.width)[:, 1:]
            places.index_copy_(0, self._rows, drafted.tokens)
            self._trees.put(self._rows, drafted)
            return
        seen, batch = growth.seen(level + 1), self._batches[level]
        seen = self._ours(seen) | self._blind
        frame = self._frames[level]
        if frame is not None:
            frame.seen.copy_(seen)
        elif batch.decode is not None:
            batch.decode = replace(batch.decode, tree=seen)

    def _ours(self, values: Tensor) -> Tensor:
        """Of rows of all ranks' sequences those of this rank's."""
        return self._mine(values.view(-1, self._shape.topk)).flatten()

    def _grow(self, level: int) -> tuple[Growth, Tensor]:
        """The tree with the continuations of a level's rows, and the hidden state in front of each
        node of the next.
        """
        parts, topk = self._parts, self._shape.topk
        if not level:
            begun = Growth.begin(self._shape, *self._best(self._logits))
            return begun, self._tail.repeat_interleave(topk, dim=0)
        growth, hidden = self._grown[level - 1]
        growth, batch = growth.copy(), self._batches[level - 1]
        self._prepare(batch)
        ids = self._ours(growth.frontier_tokens().flatten())
        hidden = self._draft.forward(batch, hidden, ids, parts.caches, None)
        logits = self._draft.logits(parts.exchange.collect(hidden, batch.order), self._out)
        return growth, growth.grow(*self._best(logits), hidden, self._mine)

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the likeliest continuations: [rows, topk] each."""
        none = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        _, values, ids = self._parts.sampler.ops.logprobs(logits, none, self._shape.topk)
        return values, ids
