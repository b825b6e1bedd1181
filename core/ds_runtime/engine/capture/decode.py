"""Decode steps captured, one per number of rows, and replayed with new inputs.

A step of n requests takes the next larger graph. Its spare rows write nothing, read one token of a
page that belongs to nobody, and start from a row of `last_tokens` that belongs to nobody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.common.progress import Progress
from ds_runtime.engine.capture.lazy import LateGraphs
from ds_runtime.engine.capture.rehearse import Rehearsed
from ds_runtime.engine.step.finite import finite_rows
from ds_runtime.engine.step.inputs import page_table
from ds_runtime.engine.step.masked_draw import MaskedDraw
from ds_runtime.engine.step.plan import StepPlan, Work
from ds_runtime.engine.step.row_order import by_rank, logit_places
from ds_runtime.engine.step.sampler import Sampler
from ds_runtime.engine.step.transfer import Buffer, Upload
from ds_runtime.errors import DsRuntimeError, KernelError, PluginError
from ds_runtime.ops.batch import Batch, DecodePart, Limits, Spread
from ds_runtime.platform.contract import GraphBackend


class Model(Protocol):
    """What a decode step asks of the model."""

    def forward(self, batch: Batch, caches: list[Tensor]) -> Tensor: ...

    def state_keys(self, part: DecodePart) -> Container[str]: ...

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, adapters: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class GraphContext:
    """What all graphs of a runner work on. spare_page: of the caches, zeroed; the last row of
    last_tokens [rows + 1] is spare as well. limits: of the largest step. adapts: rows may have
    adapters. sampler: draws behind masks are captured, too. ranks: those that have sequences of
    their own; logits are those of all.
    """

    model: Model
    stateful: Mapping[str, Any]
    caches: list[Tensor]
    spare_page: int
    last_tokens: Tensor
    limits: Limits
    vocab: int
    device: torch.device
    adapts: bool = False
    sampler: Sampler | None = None
    ranks: int = 1


def captured(
    run: Callable[[], None],
    backend: GraphBackend,
    what: str,
    remedy: str = "--disable-graph",
    ready: bool = False,
) -> Callable[[], None]:
    """What runs it again: after a first run that is not recorded, in which kernels are made ready,
    unless they are.

    Raises PluginError where it cannot be captured. what: the step that this is for. Late captures
    happen when it is called, and log what they cannot do.
    """
    if not ready and not isinstance(backend, LateGraphs):
        made_ready(run, what, remedy)
    with _refusing(what, remedy):
        return backend.capture(run)


def made_ready(run: Callable[[], None], what: str, remedy: str) -> None:
    """The first run of what is to be captured. Raises PluginError where it fails."""
    with _refusing(what, remedy):
        run()


@contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except KernelError as e:
        raise KernelError(f"{what} cannot be captured: {e}; {remedy} runs without") from e
    except DsRuntimeError:
        raise
    except Exception as e:
        raise PluginError(
            f"{what} cannot be captured: {type(e).__name__}: {e}; {remedy} runs without"
        ) from e


def prepare_kernels(
    stateful: Mapping[str, Any],
    states: Mapping[str, Any],
    batch: Batch,
    recorded: Container[str] | None = None,
) -> None:
    """Tell kernels of a captured step, in front of every replay. recorded: instead, inside the
    recording, those with these keys (`state_keys` of what runs) that prepare on the device. Each
    of them must run in there.
    """
    for key, kernel in stateful.items():
        inside = getattr(kernel, "prepares_on_device", False)
        due = not inside if recorded is None else inside and key in recorded
        if due:
            kernel.prepare(states[key], batch)


class PageTable:
    """A captured step's page table at a fixed place, `tensor` [rows, pages] int32 of the spare page
    at first. It goes to the device when it has changed: a sequence got a page, or another came.
    """

    def __init__(self, rows: int, pages: int, spare: int, device: torch.device) -> None:
        self.tensor = torch.full((rows, pages), spare, dtype=torch.int32, device=device)
        self._held: npt.NDArray[np.int32] | None = None
        self._next: npt.NDArray[np.int32] | None = None
        self._spare = spare
        self._lists: list[list[int]] | None = None
        self._whole = np.zeros((rows, 1), np.int32)

    def held(self, lists: list[list[int]]) -> npt.NDArray[np.int32]:
        """All pages of sequences, filled up with each one's first, and of spare ones behind them:
        [rows, most]. The same array, which nobody changes, while the pages are the same.
        """
        if lists != self._lists:
            most = max(map(len, lists), default=1)
            filled = [pages + pages[:1] * (most - len(pages)) for pages in lists]
            filled += [[self._spare] * most] * (self.tensor.shape[0] - len(lists))
            self._whole, self._lists = np.array(filled, np.int32), lists
        return self._whole

    def add(self, table: npt.NDArray[np.int32], upload: Upload) -> int | None:
        """[rows, n] for the next step, n ≤ pages: its number in the upload; None if it is there."""
        if self._held is table or (self._held is not None and np.array_equal(self._held, table)):
            return None
        self._next = table
        return upload.add(table)

    def take(self, sent: Upload, number: int | None) -> None:
        """What `add` has added, once it was sent."""
        if number is not None:
            table = sent[number]
            self.tensor[:, : table.shape[1]].copy_(table)
            self._held = self._next


def decode_step(size: int) -> str:
    """What is captured, for an error. size: its requests."""
    return f"a decode step of {size} requests"


class _Numbers(NamedTuple):
    """A step's arrays, by their numbers in an upload. All but the table lie at fixed places."""

    rows: int
    positions: int
    slots: int
    kv_lens: int
    adapters: int | None
    every: int | None
    table: int | None


class DecodeGraph:
    """One captured step of `size` rows, on each rank that has sequences of its own; `logits` [ranks
    · size, vocab] float32 receives its result, `finite` [ranks · size] bool which rows are numbers.
    """

    def __init__(self, place: GraphContext, size: int, logits: Tensor, finite: Tensor) -> None:
        self.size = size
        self.finite = finite
        self._place = place
        self._logits = logits
        limits = place.limits
        bounds = Limits(
            max_tokens=size,
            max_sequences=size,
            max_pages_per_sequence=limits.max_pages_per_sequence,
            page_size=limits.page_size,
            heads=limits.heads,
            device=limits.device,
        )
        self._states = {key: kernel.state(bounds) for key, kernel in place.stateful.items()}
        pages = limits.max_pages_per_sequence
        self._table = PageTable(size, pages, place.spare_page, place.device)
        # Inputs, the table as narrow as a step needs it, and what the draws of all ranks need: at
        # most 40 bytes a row each, and 20 more where there are several.
        room = size * (32 + 60 * place.ranks + 4 * limits.max_pages_per_sequence) + (1 << 12)
        self.buffer = Buffer(room, place.device)
        sampler = place.sampler
        self.masked = None if sampler is None else MaskedDraw(sampler.ops, logits)
        self._every = torch.arange(size, device=place.device)
        self._replay: Callable[[], None] | None = None

    def add(self, works: Sequence[Work], upload: Upload, every: Sequence[Work] = ()) -> _Numbers:
        """A step's inputs, filled up to `size` rows: the first arrays of its upload. every: the
        works of all ranks, where there are several.
        """
        place, count, size = self._place, len(works), self.size
        page_size, spare = place.limits.page_size, size - count
        starts = [w.start for w in works]
        rows = np.array([w.row for w in works] + [place.last_tokens.shape[0] - 1] * spare, np.int64)
        positions = np.array(starts + [0] * spare, np.int64)
        lens = np.array([n + 1 for n in starts] + [1] * spare, np.int32)
        own_slots = [
            w.pages[n // page_size] * page_size + n % page_size
            for w, n in zip(works, starts, strict=True)
        ]
        slots = np.array(own_slots + [-1] * spare, np.int64)
        table = page_table(works, page_size, place.limits.max_pages_per_sequence)
        adapters = None
        if place.adapts:
            own = np.full(size, -1, np.int32)
            own[:count] = [w.adapter for w in works]
            adapters = own
        gathered = None
        if place.adapts and place.ranks > 1:
            gathered = np.full(place.ranks * size, -1, np.int32)
            gathered[logit_places(every, place.ranks, size)] = [w.adapter for w in every]
        if spare:
            filled = np.full((size, table.shape[1]), place.spare_page, np.int32)
            filled[:count] = table
            table = filled
        return _Numbers(
            rows=upload.add(rows),
            positions=upload.add(positions),
            slots=upload.add(slots),
            kv_lens=upload.add(lens),
            adapters=None if adapters is None else upload.add(adapters),
            every=None if gathered is None else upload.add(gathered),
            table=self._table.add(table, upload),
        )

    def _prepare(self, works: Sequence[Work], sent: Upload, numbers: _Numbers) -> Batch:
        """The step's batch, over tensors that never move, with the states of its kernels."""
        self._table.take(sent, numbers.table)
        spare = self.size - len(works)
        part = DecodePart(
            page_table=self._table.tensor,
            kv_lens=sent[numbers.kv_lens],
            host_kv_lens=(*(w.start + 1 for w in works), *((1,) * spare)),
        )
        batch = Batch(
            input_ids=sent[numbers.rows],
            positions=sent[numbers.positions],
            slots=sent[numbers.slots],
            logit_rows=self._every,
            decode=part,
            states=self._states,
            adapters=None if numbers.adapters is None else sent[numbers.adapters],
        )
        if self._place.ranks > 1:
            every = None if numbers.every is None else sent[numbers.every]
            batch.spread = Spread(self.size, self.size, adapters=every, logit_adapters=every)
        prepare_kernels(self._place.stateful, self._states, batch)
        return batch

    def capture(self, backend: GraphBackend) -> None:
        """Run a step of spare rows alone, then record it."""
        place, sent = self._place, Upload(self._place.device)
        numbers = self.add((), sent)
        sent.send(self.buffer)
        batch = self._prepare((), sent, numbers)
        rows = batch.input_ids
        assert batch.decode is not None
        keys = place.model.state_keys(batch.decode)

        def run() -> None:
            prepare_kernels(place.stateful, self._states, batch, keys)
            batch.input_ids = place.last_tokens.index_select(0, rows)
            hidden = place.model.forward(batch, place.caches)
            place.model.logits(hidden, self._logits, batch.ffn_adapters)
            self.finite.copy_(finite_rows(self._logits))

        self._replay = captured(run, backend, decode_step(self.size))
        if self.masked is not None and place.sampler is not None:
            record = partial(captured, backend=backend, what=decode_step(self.size))
            self.masked.capture(place.sampler.settings((), self.masked.size), record)

    def replay(self, works: Sequence[Work], sent: Upload, numbers: _Numbers) -> Tensor:
        """Logits [ranks · size, vocab] of a step whose upload has been sent to `buffer`: of the
        works and of spare rows behind them, one rank after the other.

        They, and `finite`, are overwritten by the next replay of any graph.
        """
        assert self._replay is not None, "replayed before it was captured"
        self._prepare(works, sent, numbers)
        self._replay()
        return self._logits


class DecodeGraphs:
    """The captured steps of a runner. Raises PluginError where a kernel cannot be captured."""

    def __init__(self, place: GraphContext, sizes: Sequence[int], backend: GraphBackend) -> None:
        self.sizes = tuple(sizes)
        self._backend = backend
        self._ranks = ranks = place.ranks
        self._captured = False
        shape = (max(sizes, default=0) * ranks, place.vocab)
        logits = torch.empty(shape, dtype=torch.float32, device=place.device)
        finite = torch.ones(shape[0], dtype=torch.bool, device=place.device)
        self._graphs = [
            DecodeGraph(place, size, logits[: size * ranks], finite[: size * ranks])
            for size in self.sizes
        ]

    @torch.inference_mode()
    def capture(self, progress: bool = False) -> None:
        """Capture every size, the largest first: the others find their memory in its pool. Until
        then none is fitting.
        """
        total = len(self._graphs)
        with Progress("capturing decode steps", total, "steps", enabled=progress) as bar:
            for graph in reversed(self._graphs):
                graph.capture(self._backend)
                bar.advance(1)
        self._captured = True

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run every size once, without recording it."""
        for graph in reversed(self._graphs):
            graph.capture(Rehearsed())

    def fitting(self, plan: StepPlan) -> DecodeGraph | None:
        """The graph for a step: none if it holds prefill works or more rows than any. Where ranks
        have sequences of their own, all replay what the one with the most needs.
        """
        works = plan.works
        count = max(len(own) for own in by_rank(works, self._ranks))
        index = bisect_left(self.sizes, count)
        if (
            not self._captured
            or index == len(self.sizes)
            or any(w.tokens is not None for w in works)
            or plan.drafts
        ):
            return None
        return self._graphs[index]
