"""Trees of drafts: how they grow (EAGLE-2), and what is done with the branch that is kept.

Node 0 is the last token itself, a node comes after its parent, and `width` nodes are one forward's
share of a sequence. Source: EAGLE-2, arXiv 2406.16858: a node's score is the draft layer's
probability of its whole path. Of each level the `topk` best get `topk` children each, and of all
nodes the best are verified, which form a tree, because no child is better than its parent.

Every level is a phase of its own: kernels are told between two of them what the next one's rows
see, which the device alone knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.capture.recorder import Phase, Recorder, given_up
from ds_runtime.engine.device.parts import Parts, Results
from ds_runtime.engine.speculate.acceptance import Branch, Drafted, came_from, moves, seen_by
from ds_runtime.engine.speculate.chain import Drafts, KeptTokens
from ds_runtime.engine.speculate.follow import follow
from ds_runtime.engine.step.inputs import DraftRun, Frame, StepInputs
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Buffer, Upload
from ds_runtime.model.base import Moves
from ds_runtime.ops.batch import Batch
from ds_runtime.parallel.exchange import Pending, Pick


@dataclass(slots=True)
class Growth:
    """A tree of n sequences while it is drafted.

    scores: [n, topk] of the frontier, the nodes that the draft layer runs for next; lines: which
    of the draft layer's rows so far each of them sees; chosen: each one's parent in the frontier
    before, [n, topk].
    """

    shape: Speculation
    scores: Tensor
    frontier: Tensor  # [n, topk] numbers among all candidates
    tokens: list[Tensor] = field(default_factory=list)  # of candidates, per level [n, k or k · k]
    all_scores: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)  # candidates; −1: the root
    lines: Tensor | None = None
    chosen: Tensor | None = None
    count: int = 0

    @staticmethod
    def begin(shape: Speculation, scores: Tensor, tokens: Tensor) -> Growth:
        """With the root's continuations: log-probabilities and ids, [n, topk]."""
        found = Growth(shape, scores, torch.zeros_like(tokens))
        found._add(scores, tokens, torch.full_like(tokens, -1))
        found.frontier = torch.arange(shape.topk, device=tokens.device).expand_as(tokens)
        return found

    def copy(self) -> Growth:
        """One that grows on by itself."""
        return replace(
            self,
            tokens=self.tokens.copy(),
            all_scores=self.all_scores.copy(),
            parents=self.parents.copy(),
        )

    def _add(self, scores: Tensor, tokens: Tensor, parents: Tensor) -> None:
        self.all_scores.append(scores.nan_to_num(nan=-1e30, neginf=-1e30))
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.count += tokens.shape[1]

    def next_lines(self, level: int) -> Tensor:
        """What the frontier sees of the draft layer's rows, [n, topk], `level` ≥ 1 levels of
        them.
        """
        topk = self.shape.topk
        own = torch.ones(topk, dtype=torch.int64, device=self.scores.device)
        own = own << torch.arange((level - 1) * topk, level * topk, device=own.device)
        if self.chosen is None or self.lines is None:
            self.lines = own.expand_as(self.frontier)
        else:
            self.lines = self.lines.gather(1, self.chosen) | own
        return self.lines

    def seen(self, level: int) -> Tensor:
        """DecodePart.tree of the draft layer's rows of a level, [n · topk]."""
        lines = self.next_lines(level)
        return seen_by(lines, torch.full_like(lines, level * self.shape.topk)).flatten()

    def grow(self, scores: Tensor, tokens: Tensor, hidden: Tensor, own: Pick) -> Tensor:
        """Add the frontier's continuations, [n · topk, topk], and move on to the best of them.
        hidden: [own sequences · topk, width] of the frontier; that of each new one's parent is
        returned.
        """
        topk, first = self.shape.topk, self.count
        total = (self.scores.unsqueeze(2) + scores.reshape(-1, topk, topk)).flatten(1)
        parents = self.frontier.repeat_interleave(topk, dim=1)
        self._add(total, tokens.reshape(-1, topk * topk), parents)
        self.scores, best = self.all_scores[-1].topk(topk, dim=1)
        self.frontier, self.chosen = best + first, best // topk
        begins = torch.arange(0, hidden.shape[0], topk, device=hidden.device)
        return hidden[(begins.unsqueeze(1) + own(self.chosen)).flatten()]

    def frontier_tokens(self) -> Tensor:
        """[n, topk] ids."""
        return torch.cat(self.tokens, 1).gather(1, self.frontier)

    def best(self) -> Drafted:
        """The nodes to verify."""
        shape, device = self.shape, self.scores.device
        scores, parents = torch.cat(self.all_scores, 1), torch.cat(self.parents, 1)
        levels = torch.cat(
            [
                torch.full((tokens.shape[1],), level, dtype=torch.int64, device=device)
                for level, tokens in enumerate(self.tokens, 1)
            ]
        )
        # At equal scores the earlier, so that no child is taken without its parent.
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : shape.drafts]
        taken = order.sort(dim=1).values  # [n, drafts] candidates, parents first
        numbers = torch.zeros_like(parents).scatter_(
            1, taken, torch.arange(1, shape.tokens, device=device).expand_as(taken)
        )
        above = parents.gather(1, taken)
        above = torch.where(above < 0, 0, numbers.gather(1, above.clamp(min=0)))
        own = torch.ones_like(taken[0]) << torch.arange(1, shape.tokens, device=device)
        lines = own | 1
        root = torch.ones_like(taken[:, :1])
        lines = lines.expand_as(taken)
        for _ in range(shape.steps - 1):  # a node's line is its parent's and itself
            lines = torch.cat((root, lines), 1).gather(1, above) | own
        tokens = torch.cat(self.tokens, 1).gather(1, taken)
        return Drafted(tokens, above, levels[taken], lines)


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


class Branches:
    """After captured trees of `verified`: the kept branches come to the front, and the draft layer
    runs over them, as many tokens each as a branch can have.
    """

    def __init__(self, parts: Parts, results: Results, verified: Frame) -> None:
        assert parts.shape is not None
        self._parts, self._results, self._verified = parts, results, verified
        size, queries = verified.size, parts.shape.steps + 1
        self._frame = parts.frame(size, queries, adapts=parts.adapts)

        def made(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=parts.device)

        rows, moved = self._frame.rows, (size, queries - 1)
        self._ids, self._takes, self._last = made(rows), made(rows), made(size)
        self._moves = Moves(made(*moved, value=-1), made(*moved, value=-1), made(*moved))
        self._firsts = torch.arange(0, rows, queries, device=parts.device)
        table = 4 * self._frame.table.tensor.numel()
        self._buffer = Buffer(rows * 128 + table + (1 << 13), parts.device)
        self._trees: Batch | None = None
        self._moves_first = False
        self._run: Phase | None = None

    def capture(self, recorder: Recorder, trees: Batch, what: str) -> None:
        """Run it over dummies alone, behind a captured verification `trees` of such, then record
        it. What is recorded late may run again from its middle on, and moves do not bear that.
        """
        parts, results, sent = self._parts, self._results, Upload(self._parts.device)
        added = parts.inputs.add((), sent, self._frame)
        sent.send(self._buffer)
        batch = parts.batch(added, sent, parts.exchange.even(self._frame.rows))
        assert batch.decode is not None and parts.draft is not None
        keys = parts.draft.state_keys(batch.decode)
        self._trees, self._moves_first = trees, recorder.after > 0
        tail = parts.exchange.even(self._frame.size)

        def run() -> None:
            parts.prepare(batch, keys, inside=True)
            if not self._moves_first:
                parts.model.move(parts.caches, trees, self._moves)
            hidden = results.hidden[self._takes]
            follow(parts, batch, hidden, self._ids, self._last, tail, True, results)

        self._run = recorder.record(run, what)

    def run(
        self,
        works: Sequence[Work],
        branch: Branch,
        rows: Tensor,
        which: tuple[Pick, Pick],
        ids: Tensor,
        accepted: Tensor,
    ) -> None:
        """works: this rank's; rows: [draws] the row of each draw; which: of the draws and of
        the works. ids: [rows] what follows each; accepted: [size].
        """
        assert self._run is not None and self._trees is not None, "replayed before it was captured"
        parts, count, sent, (drawn, own) = self._parts, len(works), Upload(ids.device), which
        verified, queries = self._verified.queries, self._frame.queries
        added = parts.inputs.add(works, sent, self._frame)
        takes = np.zeros((self._frame.size, queries), np.int64)
        for place, work in enumerate(works):
            takes[place] = place * verified + np.minimum(np.arange(queries), work.length - 1)
        number = sent.add(takes.reshape(-1))
        sent.send(self._buffer)
        self._ids.copy_(ids[sent[number]])
        self._takes.copy_(came_from(branch, rows, ids.shape[0], drawn)[sent[number]])
        torch.add(self._firsts, accepted, out=self._last)
        mine = Branch(own(branch.accepted), own(branch.draws))
        found = moves(mine, self._trees.slots[rows], rows)
        for held, new in zip(self._moves, found, strict=True):
            held[:count, : new.shape[1]].copy_(new)
        self._moves.sources[:count, found.sources.shape[1] :] = -1
        self._moves.sources[count:] = -1
        if self._moves_first:
            parts.model.move(parts.caches, self._trees, self._moves)
        parts.batch(added, sent, parts.exchange.even(self._frame.rows))
        self._run()


class Tree(Drafts):
    """Trees of drafts after what a step has kept, into their rows' places."""

    def __init__(self, parts: Parts, size: int = 0) -> None:
        assert parts.draft is not None and parts.shape is not None and parts.trees is not None
        self._shape, self._trees = parts.shape, parts.trees
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
