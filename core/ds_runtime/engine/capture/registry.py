"""Which steps of a rank are captured, when, and the captured steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from ds_runtime.assembly.result import Assembly
from ds_runtime.config.graph_sizes import graph_sizes, prefill_graph_sizes
from ds_runtime.engine.capture.decode import DecodeGraphs, GraphContext
from ds_runtime.engine.capture.lazy import LateGraphs
from ds_runtime.engine.capture.prefill import PiecewiseModel, PrefillGraphs
from ds_runtime.engine.speculate.drafter import Speculator
from ds_runtime.engine.speculate.programs import Cycles
from ds_runtime.engine.speculate.tree import Trees
from ds_runtime.engine.step.sampler import Sampler
from ds_runtime.platform.contract import GraphBackend

Checking = Callable[[], AbstractContextManager[None]]
"""Within, a kernel that fails is named."""


class _Checked:
    """GraphBackend over another one: kernels that cannot be captured are named."""

    def __init__(self, backend: GraphBackend, checking: Checking) -> None:
        self._backend, self._checking = backend, checking

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend."""
        with self._checking():
            return self._backend.capture(run)


class Capturing:
    """What the platform, the configuration and the bound kernels let be captured.

    `on`: anything is. `late`: a size after it has come often, instead of at the start.
    `prefill_sizes`: tokens of the steps with prompts. `prefills_at_start`: several ranks must not
    differ in what they could capture, and sizes that are asked for are there from the start.
    """

    def __init__(
        self, assembly: Assembly, ranks: int, local_rank: int, on: bool, checking: Checking
    ) -> None:
        config, platform = assembly.config, assembly.platform
        self._assembly, self._local_rank, self._checking = assembly, local_rank, checking
        self.on, self.late = on, platform.capture_after > 0
        off = config.disable_prefill_graph or config.attention_ranks > 1 or self.late
        none = off or not platform.captures_prefill
        self.prefill_sizes = () if none else prefill_graph_sizes(config)
        self.prefills_at_start = config.prefill_graph_sizes is not None or ranks > 1

    def _backend(self) -> GraphBackend:
        platform = self._assembly.platform
        backend = _Checked(platform.graph_backend(self._local_rank), self._checking)
        after = platform.capture_after
        return LateGraphs(backend, after) if after else backend

    def steps(
        self,
        place: GraphContext,
        model: PiecewiseModel,
        parts: tuple[list[Tensor], list[Tensor]],
        sampler: Sampler,
        speculator: Speculator | None,
        trees: Trees | None,
    ) -> Captured:
        """What will be captured. parts: the caches of the model and of the draft layer."""
        backend, sizes = self._backend(), graph_sizes(self._assembly.config, self.late)
        made, (layers, behind) = Captured(), parts
        if self.prefill_sizes:
            adapts = self._assembly.lora is not None
            made.prefills = PrefillGraphs(model, layers, self.prefill_sizes, backend, adapts)
        if speculator is None:
            made.graphs = DecodeGraphs(place, sizes, backend)
        else:
            draft, shape = speculator.draft, speculator.shape
            made.cycles = Cycles.of(
                place, draft, sampler, layers, behind, shape, trees, sizes, backend
            )
        return made


@dataclass(slots=True)
class Captured:
    """Steps that are replayed, each kind where it is captured: decode steps, drafts with their
    verification, prompts in pieces."""

    graphs: DecodeGraphs | None = None
    cycles: Cycles | None = None
    prefills: PrefillGraphs | None = None

    def rehearse(self) -> None:
        """Have all that will be captured run once, in a rehearsal."""
        for each in (self.graphs, self.cycles):
            if each is not None:
                each.rehearse()

    def capture(self, capturing: Capturing, progress: bool) -> None:
        """All that is captured at the start; the rest serves and captures as steps come."""
        if self.prefills is not None and capturing.prefills_at_start:
            self.prefills.capture(progress=progress)
        elif self.prefills is not None:
            self.prefills.serve()
        for each in (self.graphs, self.cycles):
            if each is not None:
                each.capture(progress=progress)
