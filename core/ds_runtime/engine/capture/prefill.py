"""Steps with prompts, captured but for attention, one per number of tokens.

What a step's sequences are shows in attention alone: there a graph would hold for one division of
its tokens only. So the forward is captured in pieces between the attentions, which run op by op. A
step of n tokens takes the next larger graph: its spare rows write to no page, and are all alike, so
that they reach few experts. Where few rows are wanted, these alone are computed after the last
attention, op by op.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_runtime.common.progress import Progress
from ds_runtime.engine.capture.recorder import Recorder
from ds_runtime.engine.step.inputs import bare_batch
from ds_runtime.errors import DsRuntimeError
from ds_runtime.model.deepseek import Cut, DeepSeekModel
from ds_runtime.ops.batch import Batch, RowOrder
from ds_runtime.ops.contracts.caches import Caches
from ds_runtime.parallel.exchange import RowExchange
from ds_runtime.platform.graphs import borrowed

log = logging.getLogger(__name__)

_SECONDS = 4.0  # of captures at a start that need not make all


@dataclass(frozen=True, slots=True)
class StepRows:
    """Where all graphs find a step, each in as many rows as it has. They are ids, positions and
    slots [rows] int64, adapters [rows] int32 if there are any, and what attention gives. every: the
    exchange's room for the adapters of the rows of all ranks.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    attended: Tensor
    adapters: Tensor | None
    every: Tensor | None
    exchange: RowExchange

    @staticmethod
    def of(model: DeepSeekModel, size: int, device: torch.device, adapts: bool) -> StepRows:
        ids, positions, slots = torch.zeros(3, size, dtype=torch.int64, device=device)
        width = model.attended_width()
        none = torch.full((size,), -1, dtype=torch.int32, device=device) if adapts else None
        return StepRows(
            ids,
            positions,
            slots.fill_(-1),
            torch.zeros(size, width, dtype=model.dtype, device=device),
            none,
            None if none is None else model.exchange.room(none),
            model.exchange,
        )

    def first(self, size: int) -> StepRows:
        """Of a graph."""
        return StepRows(
            self.ids[:size],
            self.positions[:size],
            self.slots[:size],
            self.attended[:size],
            None if self.adapters is None else self.adapters[:size],
            None if self.every is None else self.every[: size * self.exchange.groups],
            self.exchange,
        )

    @property
    def order(self) -> RowOrder | None:
        """Every rank has as many rows."""
        return self.exchange.even(self.ids.shape[0], self.every)

    def fill(self, batch: Batch) -> None:
        """With a step, and spare rows after it."""
        n = batch.num_tokens
        self.ids[:n].copy_(batch.input_ids)
        self.positions[:n].copy_(batch.positions)
        self.slots[:n].copy_(batch.slots)
        if self.adapters is not None:
            self.adapters[:n] = -1 if batch.adapters is None else batch.adapters
        self.spare(n)
        if self.every is not None:
            self.exchange.fill(self.every, batch)

    def spare(self, n: int = 0) -> None:
        """Make rows from n on spare ones."""
        if self.adapters is not None:
            self.adapters[n:].fill_(-1)
        if n < self.ids.shape[0]:
            self.ids[n:].zero_()
            self.positions[n:].zero_()
            self.slots[n:].fill_(-1)
            self.attended[n:].zero_()


class PrefillGraph:
    """One captured step of as many tokens as `rows` has."""

    def __init__(self, model: DeepSeekModel, caches: Caches, rows: StepRows) -> None:
        self.size = rows.ids.shape[0]
        self._model, self._caches, self._rows = model, caches, rows
        self._pieces: list[tuple[Callable[[], None], Cut]] = []
        self._last: Callable[[], None] | None = None
        self._hidden: Tensor | None = None

    @property
    def is_captured(self) -> bool:
        return self._last is not None

    def _forward(self) -> Generator[Cut, None, Tensor]:
        rows = self._rows
        batch = bare_batch(rows.ids, rows.positions, rows.slots, rows.adapters, rows.order)
        return self._model.pieces(batch, self._caches, rows.attended)

    def capture(self, recorder: Recorder) -> None:
        """Run a step of spare rows alone, then record it."""
        self._rows.spare()  # they may hold a step of another size
        what, remedy = f"a step of {self.size} tokens", "--disable-prefill-graph"
        forward, found = self._forward(), list[Cut | Tensor]()

        def piece() -> None:
            try:
                found.append(next(forward))
            except StopIteration as end:
                found.append(end.value)

        def whole() -> None:
            while not found or not isinstance(found[-1], Tensor):
                piece()

        recorder.ready(whole, what, remedy)
        forward, pieces = self._forward(), list[tuple[Callable[[], None], Cut]]()
        while True:
            found.clear()
            replay = recorder.record(piece, what, remedy, ready=True)
            made = found[-1]
            if isinstance(made, Tensor):
                break
            pieces.append((replay, made.each(borrowed)))
        self._pieces, self._last, self._hidden = pieces, replay, borrowed(made)

    def replay(self, batch: Batch, every: bool) -> Tensor:
        """Final hidden states of a step's logit rows, [rows, hidden], or of every token. Where rows
        are few, what follows the last attention is computed op by op, of them alone.
        """
        assert self._last is not None and self._hidden is not None, "replayed before its capture"
        self._rows.fill(batch)
        n = batch.num_tokens
        out, selection = self._rows.attended[:n], self._model.selection(batch)
        for layer, (replay, cut) in enumerate(self._pieces):
            replay()
            self._caches.reach(layer)
            if n:  # else other ranks have all rows
                self._model.attend(cut, batch, selection, out)
        if not every and (few := self._model.few(batch)) is not None:
            return self._model.finish(self._pieces[-1][1], out, few, batch)
        self._last()
        hidden = self._hidden[:n]  # the next replay of any graph overwrites it
        if every:
            return hidden.clone()
        return self._model.exchange.collect(hidden[batch.logit_rows], batch.order)


class PrefillGraphs:
    """The captured steps of a runner: at the start all, or as many as `_SECONDS` allow, ever closer
    together; the others while there is nothing else to do. Until then steps take larger ones.
    """

    def __init__(
        self,
        model: DeepSeekModel,
        caches: Caches,
        sizes: Sequence[int],
        recorder: Recorder,
        adapts: bool,
    ) -> None:
        """sizes: rising. caches: as `pieces` takes them. adapts: rows may have adapters."""
        self._recorder = recorder
        rows = StepRows.of(model, max(sizes), next(iter(caches)).device, adapts)
        # The largest first: the others find their memory in its pool.
        every = [PrefillGraph(model, caches, rows.first(size)) for size in reversed(sizes)]
        places = sorted(range(len(every)), key=lambda i: -(i & -i or len(every)))
        self._missing = [every[i] for i in reversed(places)]  # the last is next
        self._graphs: list[PrefillGraph] = []

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of what is captured, rising."""
        return tuple(graph.size for graph in self._graphs)

    @torch.inference_mode()
    def capture(self, required: bool = True, progress: bool = False) -> None:
        """At the start. required: every size is; raises PluginError where a kernel cannot be
        captured.
        """
        total, until = len(self._missing), time.monotonic() + _SECONDS
        with (
            Progress("capturing steps with prompts", total, "steps", enabled=progress) as bar,
            self._recorder.checked,
        ):
            while self._missing and (required or time.monotonic() < until):
                self._capture(required)
                bar.advance(1)

    @torch.inference_mode()
    def capture_one(self) -> bool:
        """Capture one more, if any is missing; whether there was one."""
        if not self._missing:
            return False
        with self._recorder.checked:
            self._capture(required=False)
        return True

    def _capture(self, required: bool) -> None:
        """The next one. Unless it is required, a warning says why it cannot be, and steps of its
        size take a larger one or go on op by op.
        """
        graph = self._missing.pop()
        try:
            graph.capture(self._recorder)
        except DsRuntimeError as e:
            if required:
                raise
            log.warning("steps with prompts continue op by op: %s", e)
        else:
            insort(self._graphs, graph, key=lambda each: each.size)

    def graph_for(self, tokens: int) -> PrefillGraph | None:
        """For a step of this many tokens, at most, on a rank: none if it has more than any, or none
        itself."""
        index = bisect_left(self._graphs, tokens, key=lambda graph: graph.size)
        return self._graphs[index] if tokens and index < len(self._graphs) else None
