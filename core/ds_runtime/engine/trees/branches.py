"""What is done with the branch that is kept, and what of trees the engine is handed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from ds_runtime.engine.capture.recorder import Phase, Recorder
from ds_runtime.engine.device.parts import Parts, Results
from ds_runtime.engine.speculate.acceptance import Branch
from ds_runtime.engine.speculate.branching import AsChains
from ds_runtime.engine.speculate.follow import Own, follow
from ds_runtime.engine.step.inputs import Frame
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Buffer, Upload
from ds_runtime.engine.trees.drafting import Tree
from ds_runtime.engine.trees.nodes import Trees, came_from, moves
from ds_runtime.model.base import Moves
from ds_runtime.ops.batch import Batch
from ds_runtime.parallel.row_order import Pick


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


class TreeBranching:
    """See `Branching`."""

    branched, drafts, behind = Trees, Tree, Branches

    def move(self, parts: Parts, batch: Batch, branch: Branch, rows: Tensor, own: Pick) -> None:
        mine = Branch(own(branch.accepted), own(branch.draws))
        parts.model.move(parts.caches, batch, moves(mine, batch.slots[rows], rows))

    def as_chains(
        self,
        parts: Parts,
        works: Sequence[Work],
        branch: Branch,
        rows: Tensor,
        own: Own,
        total: int,
    ) -> AsChains:
        came = came_from(branch, rows, total, own.drawn)
        sent, exchange = Upload(parts.device), parts.exchange
        assert parts.shape is not None
        cut, _ = _cut_to_branches(works, parts.shape.steps + 1)
        _, places = _cut_to_branches(exchange.own(works), parts.shape.steps + 1)
        own, takes = Own.of(cut, parts, sent), sent.add(np.array(places, np.int64))
        order = exchange.order(cut, sent)
        added = parts.inputs.add(exchange.own(cut), sent)
        sent.send()
        batch = parts.batch(added, sent, order())
        return AsChains(batch, own, sent, sent[takes], came[sent[takes]])


def _cut_to_branches(works: Sequence[Work], most: int) -> tuple[list[Work], list[int]]:
    """Works whose trees have become chains of as many tokens as a branch can have, which begin with
    the branch; and the rows of the step that they take.
    """
    cut, rows, row = list[Work](), list[int](), 0
    for work in works:
        length = min(work.length, most) if work.tokens is None else work.length
        cut.append(msgspec.structs.replace(work, length=length))
        rows += range(row, row + length)
        row += work.length
    return cut, rows
