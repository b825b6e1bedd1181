"""Steps that draft and verify, captured: of each size the model's forward over the last tokens and
their drafts. What follows it is in `chain.py` and `tree_phases.py`: the draft layer's run over the
same tokens, and its runs behind them.

Between the first two the model's draws say which drafts were right; how many these are the host
must know before the third, because keys have other places then. Spare rows and sequences are as in
`engine/capture/decode.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from torch import Tensor

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.capture.decode import (
    GraphContext,
    captured,
    decode_step,
    prepare_kernels,
)
from ds_runtime.engine.speculate.tree import Trees
from ds_runtime.engine.step.finite import finite_rows
from ds_runtime.engine.step.inputs import Added, Frame, read_last_tokens
from ds_runtime.engine.step.page_table import PageTable
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.sampler import Sampler
from ds_runtime.engine.step.transfer import Array, Buffer, Upload
from ds_runtime.model.deepseek import DeepSeekModel
from ds_runtime.model.draft import DraftModel
from ds_runtime.ops.batch import Batch, Limits
from ds_runtime.platform.contract import GraphBackend


@dataclass(frozen=True, slots=True)
class CyclePlace:
    """What all captured cycles of a runner share.

    hidden: [rows, hidden], logits [rows, vocab] and finite [rows] bool, whether rows of these are
    numbers, of the largest verification; tail, tail_logits:
    the same of the draft layer, a row per sequence. trees: how drafts hang together, if not as
    chains. tables: by size, [size, pages]: a verification fills in what the drafting behind it
    reads.
    """

    base: GraphContext
    model: DeepSeekModel
    draft: DraftModel
    sampler: Sampler
    layers: list[Tensor]
    draft_caches: Sequence[Tensor]
    shape: Speculation
    trees: Trees | None
    hidden: Tensor
    logits: Tensor
    finite: Tensor
    tail: Tensor
    tail_logits: Tensor
    tables: dict[int, PageTable] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Tokens per row of last_tokens."""
        return self.shape.tokens

    @property
    def pages(self) -> int:
        """Columns of a table: behind a sequence that fills its context, spare tokens of a
        verification stand in a page of their own.
        """
        limits = self.base.limits
        return limits.max_pages_per_sequence + -(-(self.width - 1) // limits.page_size)

    def limits(self, size: int, queries: int) -> Limits:
        return replace(
            self.base.limits,
            max_tokens=size * queries,
            max_sequences=size,
            max_pages_per_sequence=self.pages,
            max_queries=queries,
        )

    def table(self, size: int) -> PageTable:
        """That of a size."""
        if size not in self.tables:
            base = self.base
            self.tables[size] = PageTable(size, self.pages, base.spare_page, base.device)
        return self.tables[size]


class FixedRows:
    """The inputs of `size` sequences with `queries` tokens each, at places that never move. trees:
    how these hang together, if not as chains.
    """

    def __init__(
        self, place: CyclePlace, size: int, queries: int, trees: Trees | None = None
    ) -> None:
        self.size, self.queries = size, queries
        self._place, self._trees = place, trees
        base, rows = place.base, size * queries
        bounds = place.limits(size, queries)
        self.states = {key: kernel.state(bounds) for key, kernel in base.stateful.items()}
        self._frame = Frame(size, queries, place.table(size), self.states, base.adapts)
        room = rows * 256 + size * (256 + 4 * base.limits.max_pages_per_sequence) + (1 << 13)
        self.buffer = Buffer(room, base.device)

    def add(self, works: Sequence[Work], upload: Upload) -> Added:
        """A step's inputs, filled up: the first arrays of its upload."""
        return self._place.base.inputs.add(works, upload, self._frame, self._trees)

    def prepare(self, sent: Upload, added: Added) -> Batch:
        """The batch of a step whose upload has been sent to `buffer`."""
        batch = added.batch(sent, self.states)
        prepare_kernels(self._place.base.stateful, self.states, batch)
        return batch


class VerifyGraph(FixedRows):
    """`size` sequences with `queries` tokens each: `hidden`, `logits` and `finite` of the place
    receive the model's results.
    """

    def __init__(self, place: CyclePlace, size: int, queries: int) -> None:
        super().__init__(place, size, queries, place.trees if queries > 1 else None)
        # of what a step's draws need, sent apart: see Runner._replay_cycle
        self.behind = Buffer(size * (queries + 1) * 256 + (1 << 13), place.base.device)
        self.batch: Batch | None = None  # that was captured
        self._places: Tensor | None = None
        self._replay: Callable[[], None] | None = None

    def capture(self, backend: GraphBackend) -> None:
        """Run the forward over spare rows alone, then record it."""
        place, base = self._place, self._place.base
        sent = Upload(base.device)
        numbers = self.add((), sent)
        sent.send(self.buffer)
        batch = self.batch = self.prepare(sent, numbers)
        places, rows = batch.input_ids, self.size * self.queries
        self._places = places
        assert batch.decode is not None
        keys = place.model.state_keys(batch.decode)

        def run() -> None:
            prepare_kernels(base.stateful, self.states, batch, keys)
            batch.input_ids = places
            read_last_tokens(batch, base.last_tokens)
            batch.index_keys.clear()
            hidden = place.model.forward(batch, place.layers, every=True)
            place.hidden[:rows].copy_(hidden)
            place.model.logits(hidden, place.logits[:rows], batch.adapters)
            place.finite[:rows].copy_(finite_rows(place.logits[:rows]))

        self._replay = captured(run, backend, decode_step(self.size))

    def verify(self, sent: Upload, numbers: Added) -> Tensor:
        """Logits [size · queries, vocab] of a step whose upload has been sent to `buffer`."""
        assert self._replay is not None, "replayed before it was captured"
        self.prepare(sent, numbers)
        self._replay()
        return self._place.logits[: self.size * self.queries]

    @property
    def finite(self) -> Tensor:
        """Whether rows of the logits are numbers, until the next verification of any size."""
        return self._place.finite[: self.size * self.queries]

    @property
    def inputs(self) -> Tensor:
        """Where each row's token lies in last_tokens: [size · queries] int64."""
        assert self._places is not None, "asked before it was captured"
        return self._places

    def lies(self, works: Sequence[Work]) -> Array:
        """The row of each draw: [draws] int64."""
        return _lies(tuple(w.length for w in works), self.queries)


@lru_cache(maxsize=256)  # nobody writes to it
def _lies(lengths: tuple[int, ...], queries: int) -> Array:
    return np.array([i * queries + j for i, n in enumerate(lengths) for j in range(n)], np.int64)
