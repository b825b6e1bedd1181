"""What follows a captured verification of trees, captured as well: moving the kept branches to the
front and running the draft layer over them, and the draft layer's runs that grow the next trees.

Every level of a tree is a recording of its own: kernels are told between two of them what the next
one's rows see, which the device alone knows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.capture.decode import captured, decode_step, prepare_kernels
from ds_runtime.engine.speculate.acceptance import Branch, moves
from ds_runtime.engine.speculate.tree import Drafted, Growth
from ds_runtime.engine.speculate.verification import CyclePlace, FixedRows, VerifyGraph
from ds_runtime.engine.step.inputs import Frame, Inputs, Run
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Buffer, Upload
from ds_runtime.model.deepseek import Moves
from ds_runtime.ops.batch import Batch
from ds_runtime.platform.contract import GraphBackend


class BranchGraph(FixedRows):
    """Behind trees that `verified` saw, whose sequences have the kept branch in front then: as many
    tokens each as a branch can have, in `tail` and `tail_logits` the draft layer's results behind
    the last kept one.
    """

    def __init__(self, place: CyclePlace, verified: VerifyGraph) -> None:
        super().__init__(place, verified.size, place.shape.steps + 1)
        self._verified = verified
        device, rows = place.base.device, verified.size * self.queries

        def made(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self._ids, self._takes, self._last = made(rows), made(rows), made(verified.size)
        shape = (verified.size, self.queries - 1)
        self._moves = Moves(made(*shape, value=-1), made(*shape, value=-1), made(*shape))
        self._firsts = torch.arange(0, rows, self.queries, device=device)
        self._replay: Callable[[], None] | None = None

    def capture(self, backend: GraphBackend) -> None:
        """Run it over spare rows alone, behind a captured verification of such, then record it."""
        place, size = self._place, self.size
        sent = Upload(place.base.device)
        numbers = self.add((), sent)
        sent.send(self.buffer)
        batch, trees = self.prepare(sent, numbers), self._verified.batch
        assert trees is not None, "trees are captured before their branches"
        assert batch.decode is not None
        keys = place.draft.state_keys(batch.decode)

        def run() -> None:
            prepare_kernels(place.base.stateful, self.states, batch, keys)
            place.model.move(place.layers, trees, self._moves)
            hidden = place.hidden[self._takes]
            tail = place.draft.forward(batch, hidden, self._ids, place.draft_caches, self._last)
            place.tail[:size].copy_(tail)
            place.draft.logits(tail, place.tail_logits[:size])

        self._replay = captured(run, backend, decode_step(size))

    def follow(
        self, works: Sequence[Work], tokens: Tensor, branch: Branch, rows: Tensor, slots: Tensor
    ) -> None:
        """tokens: [draws] in the order of the branches; rows: [draws] where each was drawn; slots:
        of all rows of the verification.
        """
        assert self._replay is not None, "replayed before it was captured"
        count, sent = len(works), Upload(tokens.device)
        numbers = self.add(works, sent)
        lengths = np.array([w.length for w in works], np.int64)
        along = np.minimum(np.arange(self.queries), lengths[:, None] - 1)
        draws = sent.add((along + (np.cumsum(lengths) - lengths)[:, None]).reshape(-1))
        sent.send(self.buffer)
        own, real = sent[draws], count * self.queries
        self._ids[:real].copy_(tokens[own])
        kept = own if branch.order is None else branch.order[own]  # None: no drafts were verified
        self._takes[:real].copy_(rows[kept])
        torch.add(self._firsts[:count], branch.accepted, out=self._last[:count])
        found = moves(branch, slots[rows], rows)
        for held, new in zip(self._moves, found, strict=True):
            held[:count, : new.shape[1]].copy_(new)
        self._moves.sources[:count, found.sources.shape[1] :] = -1
        self._moves.sources[count:] = -1
        self.prepare(sent, numbers)
        self._replay()


def level_runs(
    shape: Speculation, works: Sequence[Work], ends: Sequence[int], inputs: Inputs
) -> tuple[list[Run], npt.NDArray[np.int64]]:
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
        Run(
            [e + 1 + (level - 1) * topk for e in ends],
            topk,
            [min(e + level, last) for e in ends],
            [e + 1 + level * topk * fit for e, fit in zip(ends, fits, strict=True)],
        )
        for level in range(1, shape.steps)
    ]
    return runs, np.array(fits, np.int64)


class TreeGraph:
    """Trees of drafts behind `size` sequences, from `tail` on, into their rows' places."""

    def __init__(self, place: CyclePlace, size: int, drafts: int) -> None:
        self.size, self.drafts = size, drafts
        self._place, self._shape = place, place.shape
        base, key, levels = place.base, place.draft.tree_key, place.shape.steps - 1
        self._kernels = {key: base.stateful[key]} if key else {}  # none where attention is sparse
        bounds, rows = place.limits(size, place.shape.topk), size * place.shape.topk
        self._frames = [
            Frame(
                size,
                place.shape.topk,
                place.table(size),
                {key: kernel.state(bounds) for key, kernel in self._kernels.items()},
                False,
            )
            for _ in range(levels)
        ]
        room = (levels + 1) * (rows * 24 + (1 << 10)) + size * 16
        self._buffer = Buffer(room, base.device)
        self._grown: list[tuple[Growth, Tensor]] = []  # behind each level, with `hidden` in front
        self._drafted: Drafted | None = None
        self._replays: list[Callable[[], None]] = []

    def _send(
        self, works: Sequence[Work], ends: Sequence[int]
    ) -> tuple[Tensor, list[Batch], Tensor]:
        """Rows, each level's batch, and which rows see all there is, at their places. The table is
        there: the step has verified these works.
        """
        base, count, topk = self._place.base, len(works), self._shape.topk
        sent = Upload(base.device)
        rows = np.full(self.size, base.last_tokens.shape[0] // self._place.width - 1, np.int64)
        rows[:count] = [w.row for w in works]
        runs, fits = level_runs(self._shape, works, ends, base.inputs)
        added = [
            base.inputs.add(works, sent, frame, run=run)
            for frame, run in zip(self._frames, runs, strict=True)
        ]
        blind = np.full(self.size, -1, np.int64)
        blind[:count] = fits - 1
        own_rows, blind_ = sent.add(rows), sent.add(np.repeat(blind, topk))
        sent.send(self._buffer)
        batches = [
            a.batch(sent, frame.states, frame.seen)
            for a, frame in zip(added, self._frames, strict=True)
        ]
        return sent[own_rows], batches, sent[blind_]

    def capture(self, backend: GraphBackend) -> None:
        """Record level by level, over spare rows alone; what a recording leaves for the next is
        there once it was replayed.
        """
        rows, batches, blind = self._send((), ())
        self._replays, self._grown = [], []
        for level in range(self._shape.steps):
            self._prepare(level, batches)

            def run(level: int = level) -> None:
                self._prepare(level, batches, self._kernels)
                growth, hidden = self._grow(level, batches)
                del self._grown[level:]
                self._grown.append((growth, hidden))
                if level + 1 < self._shape.steps:
                    self._frames[level].seen.copy_(growth.seen(level + 1) | blind)
                else:
                    self._keep(growth.best(), rows)

            self._replays.append(captured(run, backend, decode_step(self.size)))
            self._replays[-1]()

    def _prepare(
        self, level: int, batches: Sequence[Batch], recorded: Container[str] | None = None
    ) -> None:
        """The kernels of a level's run, if it has one."""
        if level:
            batch = batches[level - 1]
            prepare_kernels(self._kernels, batch.states, batch, recorded)

    def _grow(self, level: int, batches: Sequence[Batch]) -> tuple[Growth, Tensor]:
        """The tree with the continuations of a level's rows, and the hidden state in front of each
        node of the next.
        """
        place, topk = self._place, self._shape.topk
        if not level:
            begun = Growth.begin(self._shape, *self._best(place.tail_logits[: self.size]))
            return begun, place.tail[: self.size].repeat_interleave(topk, dim=0)
        growth, hidden = self._grown[level - 1]
        growth, batch = growth.copy(), batches[level - 1]
        ids = batch.input_ids = growth.frontier_tokens().flatten()
        hidden = place.draft.forward(batch, hidden, ids, place.draft_caches, None)
        logits = place.draft.logits(hidden, place.logits[: self.size * topk])
        return growth, growth.grow(*self._best(logits), hidden)

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the likeliest continuations: [rows, topk] each."""
        none = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        _, values, ids = self._place.sampler.ops.logprobs(logits, none, self._shape.topk)
        return values, ids

    def _keep(self, drafted: Drafted, rows: Tensor) -> None:
        place = self._place
        assert place.trees is not None
        self._drafted = drafted
        place.base.last_tokens.view(-1, place.width)[:, 1:].index_copy_(0, rows, drafted.tokens)
        place.trees.put(rows, drafted)

    def replay(self, works: Sequence[Work], ends: Sequence[int], tell: bool) -> list[Tensor]:
        """Draft behind the positions `ends`: [works, drafts] tokens, and parents, if these are to
        be told.
        """
        assert self._replays, "replayed before it was captured"
        _, batches, _ = self._send(works, ends)
        for level, replay in enumerate(self._replays):
            self._prepare(level, batches)
            replay()
        assert self._drafted is not None
        found, count = self._drafted, len(works)
        return [found.tokens[:count].clone(), found.parents[:count].clone()] if tell else []
