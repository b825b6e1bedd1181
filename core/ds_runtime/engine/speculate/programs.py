"""Which captured pieces a step takes that drafts and verifies."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_runtime.common.progress import Progress
from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.capture.decode import GraphContext
from ds_runtime.engine.capture.rehearse import Rehearsed
from ds_runtime.engine.speculate.chain import ChainGraph, JudgeGraph
from ds_runtime.engine.speculate.tree import Trees
from ds_runtime.engine.speculate.tree_phases import BranchGraph, TreeGraph
from ds_runtime.engine.speculate.verification import CyclePlace, VerifyGraph
from ds_runtime.engine.step.plan import StepPlan
from ds_runtime.engine.step.sampler import Sampler
from ds_runtime.model.draft import DraftModel
from ds_runtime.platform.contract import GraphBackend


class Cycles:
    """The captured cycles of a runner. sizes: in sequences. left_out: sizes that were asked for,
    whose drafts no step could verify together.
    """

    def __init__(
        self,
        place: CyclePlace,
        sizes: Sequence[int],
        backend: GraphBackend,
        left_out: Sequence[int] = (),
    ) -> None:
        self.sizes = tuple(sizes)
        self.left_out = tuple(left_out)
        self.place = place
        self._captured = False
        drafts = place.shape.choices
        self._queries = sorted({n + 1 for n in drafts})
        self._backend = backend
        self._verify = {
            (size, queries): VerifyGraph(place, size, queries)
            for size in self.sizes
            for queries in self._queries
        }
        self._judge: dict[tuple[int, int], JudgeGraph] = {}
        self._branch: dict[int, BranchGraph] = {}
        if place.trees is None:
            self._judge = {key: JudgeGraph(place, graph) for key, graph in self._verify.items()}
        else:
            self._branch = {
                size: BranchGraph(place, self._verify[size, place.width]) for size in self.sizes
            }
        kind = ChainGraph if place.trees is None else TreeGraph
        self._drafting: dict[tuple[int, int], ChainGraph | TreeGraph] = {
            (size, n): kind(place, size, n) for size in self.sizes for n in drafts if n
        }

    @staticmethod
    def of(
        base: GraphContext,
        draft: DraftModel,
        sampler: Sampler,
        layers: list[Tensor],
        draft_caches: Sequence[Tensor],
        shape: Speculation,
        trees: Trees | None,
        sizes: Sequence[int],
        backend: GraphBackend,
    ) -> Cycles:
        """With what they share. layers: the model's caches; draft_caches: the draft layer's. Sizes
        whose drafts no step could verify together are left out.
        """
        model, queries = draft.model, max(shape.choices) + 1
        left_out = [size for size in sizes if size * queries > base.limits.max_tokens]
        sizes = [size for size in sizes if size not in left_out]
        most = max(sizes, default=0)

        def made(rows: int, columns: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(rows, columns, dtype=kind, device=base.device)

        width, dtype = model.config.hidden, model.dtype
        place = CyclePlace(
            base=base,
            model=model,
            draft=draft,
            sampler=sampler,
            layers=layers,
            draft_caches=draft_caches,
            shape=shape,
            trees=trees,
            hidden=made(most * queries, width, dtype),
            logits=made(most * max(queries, shape.topk), base.vocab, torch.float32),
            finite=torch.ones(most * queries, dtype=torch.bool, device=base.device),
            tail=made(most, width, dtype),
            tail_logits=made(most, base.vocab, torch.float32),
        )
        return Cycles(place, sizes, backend, left_out)

    @torch.inference_mode()
    def capture(self, progress: bool = False) -> None:
        """Capture everything, the largest first: the others find their memory in its pool. Until
        then none is fitting.
        """
        graphs = self._graphs()
        with Progress(
            "capturing steps with drafts", len(graphs), "graphs", enabled=progress
        ) as bar:
            for graph in graphs:
                graph.capture(self._backend)
                bar.advance(1)
        self._captured = True

    def _graphs(self) -> list[VerifyGraph | JudgeGraph | BranchGraph | ChainGraph | TreeGraph]:
        """Of each size those in front of others that need them."""
        behind = [*self._judge.values(), *self._branch.values(), *self._drafting.values()]
        graphs = [*self._verify.values(), *behind]
        return sorted(graphs, key=lambda graph: -graph.size)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run everything once, without recording it."""
        for graph in self._graphs():
            graph.capture(Rehearsed())

    def _size(self, count: int) -> int | None:
        index = bisect_left(self.sizes, count)
        return None if index == len(self.sizes) else self.sizes[index]

    def fitting(self, plan: StepPlan) -> VerifyGraph | None:
        """The graph for a step: none if it holds prefill works or more rows than any, or drafts as
        many tokens as no other.
        """
        works, size = plan.works, self._size(len(plan.works))
        if not self._captured or size is None or any(w.tokens is not None for w in works):
            return None
        if plan.drafts and (size, plan.drafts) not in self._drafting:
            return None
        index = bisect_left(self._queries, max(w.length for w in works))
        return None if index == len(self._queries) else self._verify[size, self._queries[index]]

    def judge(self, verified: VerifyGraph) -> JudgeGraph | None:
        """What follows a verification of chains; None if it was of trees."""
        return self._judge.get((verified.size, verified.queries))

    def branch(self, verified: VerifyGraph) -> BranchGraph:
        """What runs the draft layer behind a verification of trees."""
        return self._branch[verified.size]

    def drafting(self, count: int, drafts: int) -> ChainGraph | TreeGraph | None:
        """The graph that drafts behind so many sequences."""
        size = self._size(count)
        return None if size is None else self._drafting.get((size, drafts))
