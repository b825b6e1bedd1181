"""What follows a captured verification of chains, captured as well: the model's draws with the
verdict on the drafts and the draft layer's run over the same tokens, and its runs behind them.

A draft is right if it is what the model draws there (`acceptance.py`). Draws that masks,
penalties or log-probabilities go with are made op by op and brought to the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ds_runtime.engine.capture.decode import captured, decode_step, prepare_kernels
from ds_runtime.engine.speculate.acceptance import lucky
from ds_runtime.engine.speculate.verification import CyclePlace, VerifyGraph
from ds_runtime.engine.step.inputs import Frame, Run
from ds_runtime.engine.step.masked_draw import Columns
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.sampler import Draw
from ds_runtime.engine.step.transfer import Array, Buffer, Steady, Upload
from ds_runtime.ops.batch import Batch
from ds_runtime.platform.contract import GraphBackend


class JudgeGraph:
    """Behind chains that `verified` saw: a draw per row; `accepted` [size] int64, how many drafts
    of each sequence were right; and in `tail` and `tail_logits` the draft layer's results at its
    last kept token.
    """

    def __init__(self, place: CyclePlace, verified: VerifyGraph) -> None:
        self.size, self.queries = verified.size, verified.queries
        self._place, self._verified = place, verified
        device, rows = place.base.device, self.size * self.queries

        def made(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        self.drawn, self.accepted, self._last = made(rows), made(self.size), made(self.size)
        self._firsts = torch.arange(0, rows, self.queries, device=device)
        self._inputs = Steady(rows * 64 + (1 << 12), device)
        self._judged: tuple[Tensor, Tensor] | None = None
        self._draw: Callable[[], None] | None = None
        self._follow: Callable[[], None] | None = None

    def capture(self, backend: GraphBackend) -> None:
        """Run both over spare rows alone, behind a captured verification of such, then record
        them.
        """
        place, rows, batch = self._place, self.size * self.queries, self._verified.batch
        assert batch is not None and batch.decode is not None, "verified first"
        stateful, states = place.base.stateful, self._verified.states
        keys = place.draft.state_keys(batch.decode)
        others = keys - place.model.state_keys(batch.decode)
        settings = self.send((), place.sampler.settings((), rows), None)

        def draw() -> None:
            self.drawn.copy_(place.sampler.ops.sample(place.logits[:rows], *settings))
            self.judge()

        def follow() -> None:
            prepare_kernels(stateful, states, batch, others)
            hidden, ids = place.hidden[:rows], self.drawn
            tail = place.draft.forward(batch, hidden, ids, place.draft_caches, self._last)
            place.tail[: self.size].copy_(tail)
            place.draft.logits(tail, place.tail_logits[: self.size])

        self._draw = captured(draw, backend, decode_step(self.size))
        self._follow = captured(follow, backend, decode_step(self.size))

    def send(
        self, works: Sequence[Work], settings: Columns, simulated: float | None
    ) -> list[Tensor]:
        """Queue the transfer of what the draws and the verdict need. settings: Sample's, of all
        rows; returned as tensors, at places that never move. simulated: as in `verify.claim`.
        """
        judged, luck = _judged(tuple(w.length for w in works), self.size, self.queries)
        if simulated is not None and works and self.queries > 1:
            luck = np.zeros_like(judged)
            luck[: len(works)] = judged[: len(works)] & lucky(works, self.queries - 1, simulated)
            judged = np.zeros_like(judged)
        *found, judged_, luck_ = self._inputs.send([*settings, judged, luck])
        self._judged = judged_, luck_
        return found

    def judge(self) -> None:
        """The verdict on the drafts, by `drawn`; the last kept draws become the sequences' last
        tokens.
        """
        places, last_tokens = self._verified.inputs, self._place.base.last_tokens
        assert self._judged is not None, "judged before it was told what to judge"
        if self.queries > 1:
            shape, (judged, luck) = (self.size, self.queries), self._judged
            fronts = last_tokens.index_select(0, places).view(shape)
            same = self.drawn.view(shape)[:, :-1] == fronts[:, 1:]
            right = torch.where(judged, same, luck)
            torch.sum(right if self.queries == 2 else right.cumprod(1), 1, out=self.accepted)
        torch.add(self._firsts, self.accepted, out=self._last)
        kept = self.drawn.index_select(0, self._last)
        last_tokens.index_copy_(0, places[:: self.queries], kept)

    def draw(self) -> None:
        """Draw by the settings that were sent, and judge."""
        assert self._draw is not None, "replayed before it was captured"
        self._draw()

    def follow(self) -> None:
        """The draft layer's run behind the verdict."""
        assert self._follow is not None, "replayed before it was captured"
        self._follow()


@lru_cache(maxsize=256)  # nobody writes to them, and the same arrays need not be sent again
def _judged(lengths: tuple[int, ...], size: int, queries: int) -> tuple[Array, Array]:
    """[size, queries − 1] bool each: where a draft stands; nowhere."""
    judged = np.zeros((size, queries - 1), np.bool_)
    if lengths:
        judged[: len(lengths)] = np.arange(1, queries) < np.array(lengths)[:, None]
    return judged, np.zeros_like(judged)


@lru_cache(maxsize=256)
def _rows(rows: tuple[int, ...], size: int, spare: int) -> Array:
    """[size] int64, filled up with the spare one. Nobody writes to it."""
    return np.array(rows + (spare,) * (size - len(rows)), np.int64)


class ChainGraph:
    """`drafts` drafts of `size` sequences, from `tail_logits` on, into their rows' places."""

    def __init__(self, place: CyclePlace, size: int, drafts: int) -> None:
        self.size, self.drafts = size, drafts
        self._place = place
        base, key = place.base, place.draft.state_key
        self._kernels = {key: base.stateful[key]} if key else {}  # none where attention is sparse
        bounds = place.limits(size, 1)
        self._frames = [
            Frame(
                size,
                1,
                place.table(size),
                {key: kernel.state(bounds) for key, kernel in self._kernels.items()},
                False,
            )
            for _ in range(drafts - 1)
        ]
        self._buffer = Buffer((size * 24 + (1 << 8)) * drafts, base.device)
        self._settings = Steady(size * (drafts * 32 + 8) + (1 << 10), base.device)
        self._replay: Callable[[], None] | None = None

    def _runs(self, works: Sequence[Work], ends: Sequence[int]) -> list[Batch]:
        """The batch of each run behind the first draft, at places that never move. The table is
        there: the step has verified these works.
        """
        inputs, upload = self._place.base.inputs, Upload(self._place.base.device)
        runs = [Run([end + s for end in ends]) for s in range(1, self.drafts)]
        added = [
            inputs.add(works, upload, frame, run=run)
            for frame, run in zip(self._frames, runs, strict=True)
        ]
        upload.send(self._buffer)
        batches = [a.batch(upload, f.states) for a, f in zip(added, self._frames, strict=True)]
        for batch in batches:
            prepare_kernels(self._kernels, batch.states, batch)
        return batches

    def _draws(self, works: Sequence[Work], ends: Sequence[int]) -> list[Tensor]:
        """Rows, and the settings of all draws, one draft after the other, at places that never
        move.
        """
        place, sampler = self._place, self._place.sampler
        spare = place.base.last_tokens.shape[0] // place.width - 1
        rows = tuple(w.row for w in works)
        draws: list[Draw | None] = []
        if any(sampler.row(row).params.temperature > 0.0 for row in rows):  # else greedy
            rest = [None] * (self.size - len(works))
            for behind in range(2, 2 + self.drafts):
                draws += [Draw(r, e + behind) for r, e in zip(rows, ends, strict=True)]
                draws += rest
        columns = sampler.settings(draws, self.drafts * self.size)
        return self._settings.send([_rows(rows, self.size, spare), *columns])

    def capture(self, backend: GraphBackend) -> None:
        """Run it over spare rows alone, then record it."""
        place, size = self._place, self.size
        (rows, *columns), batches = self._draws((), ()), self._runs((), ())
        settings = [[c[s : s + size] for c in columns] for s in range(0, size * self.drafts, size)]
        sample = place.sampler.ops.sample
        kept = self._kept()

        def run() -> None:
            logits, hidden = place.tail_logits[:size], place.tail[:size]
            found = [sample(logits, *settings[0])]
            for batch, some in zip(batches, settings[1:], strict=True):
                prepare_kernels(self._kernels, batch.states, batch, self._kernels)
                hidden = place.draft.forward(batch, hidden, found[-1], place.draft_caches, None)
                place.draft.logits(hidden, logits)
                found.append(sample(logits, *some))
            kept.index_copy_(0, rows, torch.stack(found, dim=1))

        self._replay = captured(run, backend, decode_step(self.size))

    def _kept(self) -> Tensor:
        """Where drafts lie, of every row there is: [rows, drafts] int64."""
        place = self._place
        return place.base.last_tokens.view(-1, place.width)[:, 1 : 1 + self.drafts]

    def replay(self, works: Sequence[Work], ends: Sequence[int], tell: bool) -> list[Tensor]:
        """Draft behind the positions `ends`: [works, drafts] ids, if these are to be told."""
        assert self._replay is not None, "replayed before it was captured"
        rows, *_ = self._draws(works, ends)
        if self.drafts > 1:
            self._runs(works, ends)
        self._replay()
        return [self._kept().index_select(0, rows[: len(works)])] if tell else []
