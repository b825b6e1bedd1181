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
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ds_runtime.common.progress import Progress
from ds_runtime.engine.capture.lazy import LateGraphs
from ds_runtime.engine.capture.rehearse import Rehearsed
from ds_runtime.engine.step.finite import finite_rows
from ds_runtime.engine.step.inputs import Added, Frame, Inputs, read_last_tokens
from ds_runtime.engine.step.masked_draw import MaskedDraw
from ds_runtime.engine.step.page_table import PageTable
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
    inputs: Inputs
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


def decode_step(size: int) -> str:
    """What is captured, for an error. size: its requests."""
    return f"a decode step of {size} requests"


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
        states = {key: kernel.state(bounds) for key, kernel in place.stateful.items()}
        pages = limits.max_pages_per_sequence
        table = PageTable(size, pages, place.spare_page, place.device)
        self._frame = Frame(size, 1, table, states, place.adapts)
        # Inputs, the table as narrow as a step needs it, and what the draws of all ranks need: at
        # most 40 bytes a row each, and 20 more where there are several.
        room = size * (32 + 60 * place.ranks + 4 * limits.max_pages_per_sequence) + (1 << 12)
        self.buffer = Buffer(room, place.device)
        sampler = place.sampler
        self.masked = None if sampler is None else MaskedDraw(sampler.ops, logits)
        self._replay: Callable[[], None] | None = None

    def add(
        self, works: Sequence[Work], upload: Upload, every: Sequence[Work] = ()
    ) -> tuple[Added, int | None]:
        """A step's inputs, filled up to `size` rows: the first arrays of its upload. every: the
        works of all ranks, where there are several.
        """
        place, gathered = self._place, None
        if place.adapts and place.ranks > 1:
            adapters = np.full(place.ranks * self.size, -1, np.int32)
            adapters[logit_places(every, place.ranks, self.size)] = [w.adapter for w in every]
            gathered = upload.add(adapters)
        return place.inputs.add(works, upload, self._frame), gathered

    def _prepare(self, sent: Upload, numbers: tuple[Added, int | None]) -> Batch:
        """The step's batch, over tensors that never move, with the states of its kernels."""
        added, gathered = numbers
        batch = added.batch(sent, self._frame.states)
        if self._place.ranks > 1:
            every = None if gathered is None else sent[gathered]
            batch.spread = Spread(self.size, self.size, adapters=every, logit_adapters=every)
        prepare_kernels(self._place.stateful, batch.states, batch)
        return batch

    def capture(self, backend: GraphBackend) -> None:
        """Run a step of spare rows alone, then record it."""
        place, sent = self._place, Upload(self._place.device)
        numbers = self.add((), sent)
        sent.send(self.buffer)
        batch = self._prepare(sent, numbers)
        places = batch.input_ids
        assert batch.decode is not None
        keys = place.model.state_keys(batch.decode)

        def run() -> None:
            prepare_kernels(place.stateful, batch.states, batch, keys)
            batch.input_ids = places
            read_last_tokens(batch, place.last_tokens)
            hidden = place.model.forward(batch, place.caches)
            place.model.logits(hidden, self._logits, batch.ffn_adapters)
            self.finite.copy_(finite_rows(self._logits))

        self._replay = captured(run, backend, decode_step(self.size))
        if self.masked is not None and place.sampler is not None:
            record = partial(captured, backend=backend, what=decode_step(self.size))
            self.masked.capture(place.sampler.settings((), self.masked.size), record)

    def replay(self, sent: Upload, numbers: tuple[Added, int | None]) -> Tensor:
        """Logits [ranks · size, vocab] of a step whose upload has been sent to `buffer`: of the
        works and of spare rows behind them, one rank after the other.

        They, and `finite`, are overwritten by the next replay of any graph.
        """
        assert self._replay is not None, "replayed before it was captured"
        self._prepare(sent, numbers)
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
