"""A step as data. Its kind says which phases run, and where the host waits. Its works say who runs
them: `Replayed`, from recordings of one size, or `OpByOp`, over as many rows as there are.

`Replayed` has recordings of `forward`, of `judge` where draws are plain chains' (or of `draw`
after masks), of `follow` and of `draft`; `OpByOp` of pieces between the attentions of prompts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch

from ds_runtime.assembly.result import Assembly
from ds_runtime.common.progress import Progress
from ds_runtime.config.graph_sizes import graph_sizes, prefill_graph_sizes, verifying_sizes
from ds_runtime.engine.capture.prefill import PrefillGraphs
from ds_runtime.engine.capture.recorder import Checking, Recorder
from ds_runtime.engine.device.op_by_op import OpByOp
from ds_runtime.engine.device.parts import Parts, Results
from ds_runtime.engine.device.replayed import Replayed, decode_step
from ds_runtime.engine.speculate.branching import branching
from ds_runtime.engine.speculate.chain import Chain, Drafts
from ds_runtime.engine.step.masked_draw import can_capture
from ds_runtime.engine.step.plan import StepPlan
from ds_runtime.engine.step.result import Handle
from ds_runtime.model.deepseek import DeepSeekModel

Kind = Literal["decode", "prompts", "verify", "draft", "prompts, verify", "prompts, draft"]
Rest = Callable[[], None]
"""What is left of a step once the host knows which drafts were right."""

WAIT: Final = "wait"  # for how many drafts were kept: keys have other places then
_VERIFY = ("inputs", "forward", "judge")
_DRAFT = ("tell", "follow", WAIT, "draft")
PROGRAMS: Mapping[Kind, tuple[str, ...]] = {
    "decode": ("inputs", "forward", "draw"),
    "prompts": ("inputs", "forward", "draw", "score"),
    "verify": (*_VERIFY, "settle"),
    "draft": (*_VERIFY, *_DRAFT),
    "prompts, verify": (*_VERIFY, "score", "follow"),
    "prompts, draft": (*_VERIFY, "score", *_DRAFT),
}
"""The phases of each kind of step: methods of who runs it."""


def kind_of(plan: StepPlan, speculates: bool) -> Kind:
    """speculates: there is a draft layer, which sees every prompt. A step that has no drafts, and
    makes none, decodes as without it.
    """
    prompts = any(w.tokens is not None for w in plan.works)
    if speculates and plan.drafts:
        return "prompts, draft" if prompts else "draft"
    if speculates and (prompts or any(w.length > 1 for w in plan.works)):
        return "prompts, verify" if prompts else "verify"
    return "prompts" if prompts else "decode"


def run(who: Replayed | OpByOp, handle: Handle, kind: Kind) -> Rest | None:
    """Launch a step. Returns what is left of it, after the place where the host waits."""
    phases = PROGRAMS[kind]
    step: Any = who.begin(handle, "judge" in phases)
    waits = phases.index(WAIT) if WAIT in phases else len(phases)
    for phase in phases[:waits]:
        getattr(who, phase)(step)
    if step.drafting is None:  # no work draws, or none is to be drafted for
        return None

    def rest() -> None:
        for phase in phases[waits + 1 :]:
            getattr(who, phase)(step)

    return rest


class Programs:
    """Of one rank. What is captured follows from the platform, the configuration and the bound
    kernels (`captures`): a size at the start, or where captures are `late`, once it has come often.

    sizes: requests of captured decode steps, on a rank. left_out: those that were asked for, whose
    drafts no step could verify together. prefill_sizes: tokens of captured steps with prompts.
    serves: decode steps may be replayed.
    """

    def __init__(
        self,
        assembly: Assembly,
        parts: Parts,
        ranks: int,
        local_rank: int,
        captures: bool,
        checking: Checking,
    ) -> None:
        """ranks: of the group, which must not differ in what they could capture."""
        config, platform = assembly.config, assembly.platform
        self._parts = parts
        self.op_by_op = OpByOp(parts)
        self.late = platform.capture_after > 0
        self.sizes: tuple[int, ...] = ()
        self.left_out: tuple[int, ...] = ()
        self.prefill_sizes: tuple[int, ...] = ()
        self.captured: dict[tuple[int, int], Replayed] = {}
        self.drafting: dict[tuple[int, int], Drafts] = {}
        self._queries: list[int] = []
        self.serves = False
        if not captures:
            return
        backend = platform.graph_backend(local_rank)
        self._recorder = Recorder(backend, platform.capture_after, checking, ranks)
        pieces = platform.captures_prefill and not config.disable_prefill_graph and not self.late
        if pieces and isinstance(parts.model, DeepSeekModel):
            self.prefill_sizes = prefill_graph_sizes(config)
            self.op_by_op.prefills = PrefillGraphs(
                parts.model, parts.caches, self.prefill_sizes, self._recorder, parts.adapts
            )
        # Ranks that differ in what is captured would wait for each other.
        self._required = config.prefill_graph_sizes is not None or ranks > 1
        choices = (0,) if parts.shape is None or parts.draft is None else parts.shape.choices
        self._queries = sorted({drafts + 1 for drafts in choices})
        most = None if parts.draft is None else self._queries[-1]
        self.sizes = verifying_sizes(config, most, self.late)
        self.left_out = tuple(sorted({*graph_sizes(config, self.late)} - {*self.sizes}))
        self._place(choices, can_capture(assembly.binding))

    def _place(self, choices: Sequence[int], masked: bool) -> None:
        """Places for all that will be captured. choices: how many tokens steps draft."""
        parts, queries, fits = self._parts, self._queries[-1], self.sizes
        self._results = Results.of(parts, max(fits, default=0), queries)
        alone, ways = parts.draft is None, branching(parts.shape)
        for size in fits:
            for drafts in choices:
                if drafts:
                    made = ways.drafts(parts, size) if ways else Chain(parts, drafts, size)
                    self.drafting[size, drafts] = made
            for count in self._queries:
                drafting = {n: made for (s, n), made in self.drafting.items() if s == size}
                given = parts, self._results, size, count, masked and alone, drafting
                self.captured[size, count] = Replayed(*given)

    def launch(self, handle: Handle, alone: OpByOp | None = None) -> tuple[Rest | None, bool]:
        """Launch a step: what is left of it, and whether recordings run it. alone: who runs it
        instead, over caches of its own.
        """
        plan, parts = handle.plan, self._parts
        who = alone or self.select(plan)
        replays = isinstance(who, Replayed)
        if replays and parts.caches.arriving is not None:
            parts.caches.arriving.wait()  # a replay asks for no layer
        return run(who, handle, kind_of(plan, parts.draft is not None)), replays

    def select(self, plan: StepPlan) -> Replayed | OpByOp:
        """Who runs a step. Op by op if it holds prompts, more sequences than any size, or
        drafts that nothing captured makes. Where ranks have sequences of their own, all replay what
        the one with the most needs.
        """
        works = plan.works
        index = bisect_left(self.sizes, self._parts.exchange.largest(works))
        if not self.serves or index == len(self.sizes) or any(w.tokens is not None for w in works):
            return self.op_by_op
        size, most = self.sizes[index], max(w.length for w in works)
        queries = bisect_left(self._queries, most)
        if (plan.drafts and (size, plan.drafts) not in self.drafting) or queries == len(
            self._queries
        ):
            return self.op_by_op
        return self.captured[size, self._queries[queries]]

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Have all that will be captured at the start run once, in a rehearsal."""
        if not self.late:
            self._capture_all(Recorder(None), False)

    @torch.inference_mode()
    def capture(self, progress: bool) -> None:
        """All that is captured at the start; the rest comes with its steps, or while idle."""
        if (prefills := self.op_by_op.prefills) is not None:
            prefills.capture(self._required, progress)
        if self.sizes:
            self._capture_all(self._recorder, progress)
            self.serves = True

    def capture_one(self) -> bool:
        """Capture one more of the steps that the start has left; whether there was one."""
        prefills = self.op_by_op.prefills
        return prefills is not None and prefills.capture_one()

    def _capture_all(self, recorder: Recorder, progress: bool) -> None:
        """The largest size first: the others find their memory in its pool. Of each what is in
        front of others that need it.
        """
        drafts = self._parts.draft is not None
        kind, unit = ("steps with drafts", "graphs") if drafts else ("decode steps", "steps")
        total = len(self.captured) * (1 + drafts) + len(self.drafting)
        bar = Progress(f"capturing {kind}", total, unit, enabled=progress)
        with bar, recorder.checked:
            for size in reversed(self.sizes):
                for (own, _), step in self.captured.items():
                    if own == size:
                        step.capture(recorder)
                        bar.advance(1 + drafts)
                for (own, _), made in self.drafting.items():
                    if own == size:
                        made.capture(recorder, self._results, decode_step(size))
                        bar.advance(1)

    def forget(self) -> None:
        """Let go of all that is captured: while a step could replay a collective, its group does
        not end.
        """
        self.captured, self.drafting, self.serves = {}, {}, False
        self.op_by_op.prefills = None
