"""One rank's device side: weights, caches, step state; a plan in, tokens out.

`launch` queues a step without waiting for the device, `collect` waits for its results, so that
the loop may schedule the next step in between.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ds_runtime.assembly.result import Assembly
from ds_runtime.common.progress import Progress
from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.capture.decode import DecodeGraph, GraphContext
from ds_runtime.engine.capture.registry import Captured, Capturing
from ds_runtime.engine.capture.rehearse import rehearsing
from ds_runtime.engine.device.precompile import Ahead
from ds_runtime.engine.device.variants import PAGES, StepLimits, covering_steps, one_of_each_kind
from ds_runtime.engine.device.warmup import warm_up_length, warm_up_steps
from ds_runtime.engine.speculate.acceptance import Branch, Claims, claim, fronts, moves, verify
from ds_runtime.engine.speculate.drafter import Speculator
from ds_runtime.engine.speculate.tree import Trees
from ds_runtime.engine.speculate.verification import VerifyGraph
from ds_runtime.engine.step.finite import finite_rows
from ds_runtime.engine.step.inputs import Inputs, read_last_tokens
from ds_runtime.engine.step.masked_draw import can_capture
from ds_runtime.engine.step.plan import PutAdapter, StepPlan, StepResult, Work
from ds_runtime.engine.step.result import SCORE_ROWS, Handle, sort_rows
from ds_runtime.engine.step.row_order import Spreading, by_rank, logit_places
from ds_runtime.engine.step.sampler import Draws, Sampler
from ds_runtime.engine.step.transfer import Upload, put
from ds_runtime.errors import CheckpointError, DsRuntimeError, KernelError
from ds_runtime.kv.budget import KvMemory, Room, context_length, kv_memory
from ds_runtime.kv.caches import allocate
from ds_runtime.ops.batch import Batch, Limits
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.platform.contract import Communicator
from ds_runtime.weights.load import load_draft, load_model


class Runner:
    """Loads the model of one rank and runs steps.

    Raises ConfigError when the KV cache does not fit, CheckpointError for bad weights. `poison`
    fills the caches with NaN, so that reading a page before writing it shows. `bound`: the ops,
    where somebody watches them. `local_rank` of `local_ranks` on this machine (default: those of
    the group): the platform's number for the device.
    """

    def __init__(
        self,
        assembly: Assembly,
        comm: Communicator,
        local_rank: int = 0,
        local_ranks: int | None = None,
        *,
        poison: bool = False,
        bound: BoundOps | None = None,
    ) -> None:
        self.assembly = assembly
        self.comm = comm
        self.rank = rank = comm.rank
        self.local_rank, self.local_ranks = local_rank, local_ranks or comm.size
        self.config = assembly.config
        self.platform = assembly.platform
        self.device = self.platform.device(local_rank)
        self.context_length = context_length(assembly)
        self.max_pages = -(-self.context_length // self.config.page_size)
        self.bound = bound or BoundOps(assembly.binding)
        self.speculation = Speculation.of(self.config)
        self.width = self.speculation.tokens if self.speculation else 1
        self.simulated: float | None = None  # probability of a draft, instead of its truth
        idle = self.platform.memory(local_rank)
        comm.gather_objects(None)  # nobody loads before all have looked
        captures = self.bound.base.graph_capture
        self.capturing = Capturing(assembly, comm.size, local_rank, captures, self.checking)
        most = self.config.max_step_tokens if rank == 0 else 0
        with Ahead(self.bound, self.device, most, idle.total), self.checking():
            self.model = load_model(assembly, self.bound, comm, self.device, progress=rank == 0)
            draft = load_draft(assembly, self.model, self.bound, self.device, progress=rank == 0)
        if assembly.lora is not None:
            for slot, spec in enumerate(assembly.lora.adapters):
                self.put_adapter(PutAdapter(slot, str(spec.folder)))
        self.states = {
            key: kernel.state(self._limits()) for key, kernel in self.bound.stateful.items()
        }
        self.sampler = Sampler(
            self.bound.at(-1, "sampler"),
            self.config.max_running_requests,
            assembly.model.vocab_size,
            self.device,
            self.width,
        )
        rows = self.config.max_running_requests + 1  # one for the spare rows of captured steps
        self.last_tokens = torch.zeros(  # and the drafts behind it, per row
            rows * self.width, dtype=torch.int64, device=self.device
        )
        self.inputs = Inputs(
            self.config.page_size,
            self.max_pages,
            self.context_length,
            self.last_tokens,
            self.config.prefix_chunk,
            self.width,
        )
        self.trees: Trees | None = None
        if self.speculation is not None and self.speculation.topk > 1:
            self.trees = Trees(rows, self.width, self.device)
        self.speculator: Speculator | None = None
        if draft is not None and self.speculation is not None:
            self.speculator = Speculator(
                draft,
                self.speculation,
                self.bound,
                self.states,
                self.sampler,
                self.last_tokens,
                self.trees,
                self.inputs,
                (self.rank, self.config.attention_ranks),
            )
        self.memory = self._plan_memory(idle.free)
        self.num_pages = self.memory.pages
        self.caches = self._allocate(self.num_pages + captures, poison)
        self._unfinished: tuple[Handle, Callable[[], None]] | None = None
        self.captured = Captured()
        if captures:
            parts = self._parts(self.caches)
            self.captured = self.capturing.steps(
                self._place(), self.model, parts, self.sampler, self.speculator, self.trees
            )

    def checking(self) -> AbstractContextManager[None]:
        """Within, kernels that break their contract are named."""
        return self.bound.checking(self.assembly.plugins.owners)

    def _limits(self) -> Limits:
        return Limits(
            max_tokens=self.config.max_step_tokens,
            max_sequences=self.config.max_running_requests,
            max_pages_per_sequence=self.max_pages,
            page_size=self.config.page_size,
            heads=self.assembly.model.heads // self.config.attention_tp,
            device=self.device,
            max_queries=self.width,
        )

    def _place(self) -> GraphContext:
        """Of captured steps, with the last page as the spare one."""
        for cache in self.caches:
            cache[-1].zero_()
        return GraphContext(
            model=self.model,
            inputs=self.inputs,
            stateful=self.bound.stateful,
            caches=self.caches,
            spare_page=self.num_pages,
            last_tokens=self.last_tokens,
            limits=self._limits(),
            vocab=self.assembly.model.vocab_size,
            device=self.device,
            adapts=self.assembly.lora is not None,
            sampler=self.sampler if can_capture(self.assembly.binding) else None,
            ranks=self.config.attention_ranks,
        )

    def _own(self, works: Sequence[Work]) -> Sequence[Work]:
        """Those whose attention this rank computes."""
        ranks = self.config.attention_ranks
        return works if ranks == 1 else by_rank(works, ranks)[self.rank]

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, on all ranks together where each has sequences of its
        own.
        """
        return self.num_pages * self.config.page_size * self.config.attention_ranks

    def _plan_memory(self, before: int) -> KvMemory:
        """The pages that every rank can hold: collective. before: bytes of its device that were
        free before loading."""
        here = (socket.gethostname(), str(self.device))
        sharing = self.comm.gather_objects(here).count(here)  # and all have loaded by now
        first = self.local_rank - self.comm.rank  # of this group
        others = {*range(self.local_ranks)} - {*range(first, first + self.comm.size)}
        sharing += sum(self.platform.device(rank) == self.device for rank in others)
        memory = self.platform.memory(self.local_rank)
        room = Room(memory.total // sharing, before // sharing, memory.free // sharing)
        mine = kv_memory(self.assembly, room, self.context_length)
        pages = self.comm.gather_objects(mine.pages)
        fewest = min(pages)
        if fewest < self.max_pages:
            raise mine.too_small(fewest, self.context_length)
        if mine.warning and self.rank == 0:
            print(f"warning: {mine.warning}", file=sys.stderr, flush=True)
        return replace(mine, pages=fewest)

    def _allocate(self, pages: int, poison: bool, quiet: bool = False) -> list[Tensor]:
        shown, total = self.rank == 0 and not quiet, pages * self.memory.page_bytes
        caches = allocate(self.assembly, self.bound, pages, total, self.device, shown)
        for cache in caches if poison else ():
            cache.fill_(float("nan") if cache.is_floating_point() else 255)
        return caches

    def _parts(self, caches: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The model's caches, and the draft layer's: it has the last of either kind."""
        layers, indexers = self.assembly.model.layers, self.assembly.model.indexers
        latents, keys = caches[: self.assembly.cached_layers], caches[self.assembly.cached_layers :]
        return latents[:layers] + keys[:indexers], latents[layers:] + keys[indexers:]

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step. Every rank launches the same plans in the same order."""
        try:
            self._finish()
            return self._launch(plan, self.caches)
        except BaseException as e:
            prompts = any(work.tokens is not None for work in plan.works)
            e.add_note("in a step with prompts" if prompts else "in a decode step")
            if said := self.bound.suspect(self.assembly.plugins.owners, e):
                e.add_note(said)
            self._blame(plan, e)
            raise

    def _blame(self, plan: StepPlan, error: BaseException) -> None:
        """Raise KernelError if a kernel is why a step failed: it fails once more, checked. Where
        there are several ranks, the others would have to take part in that.
        """
        if isinstance(error, KeyboardInterrupt | DsRuntimeError) or self.comm.size > 1:
            return
        try:
            with self.checking():
                self._launch(plan, self.caches)
        except KernelError as blamed:
            raise blamed from error
        except BaseException:
            return

    def _finish(self) -> None:
        """Draft what the last step launched is to draft: wait for what the device has verified."""
        if self._unfinished is None:
            return
        (handle, draft), self._unfinished = self._unfinished, None
        with torch.inference_mode():
            draft()
        if self.rank == 0 and handle.arriving is None:
            handle.download()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, caches: list[Tensor]) -> Handle:
        for init in plan.init:
            self.sampler.start(init)
        handle, graph, cycle = Handle(plan), None, None
        captured = self.captured if caches is self.caches else Captured()
        if captured.graphs is not None:
            graph = captured.graphs.fitting(plan)
        if captured.cycles is not None:
            cycle = captured.cycles.fitting(plan)
        if graph is not None:
            self._replay(graph, handle)
        elif cycle is not None:
            self._replay_cycle(cycle, handle)
        else:
            self._run(handle, caches)
        if self.rank == 0 and handle.arriving is None and self._unfinished is None:
            handle.download()  # nobody collects elsewhere
        return handle

    def _sort(self, handle: Handle) -> None:
        """What the step's logit rows are for: every way to run one begins with it, or has it done
        once the device is at work."""
        handle.wanted = sort_rows(handle.plan, lambda row: self.sampler.row(row).prompt)

    def _replay(self, graph: DecodeGraph, handle: Handle) -> None:
        """A step of decode works alone, each with one draw."""
        self._sort(handle)
        works, sent = handle.plan.works, Upload(self.device)
        own, ranks = self._own(works), self.config.attention_ranks
        numbers = graph.add(own, sent, works)
        places = None if ranks == 1 else logit_places(works, ranks, graph.size)
        draws = self.sampler.prepare(handle.wanted.draws, sent, graph.masked, places)
        order = None if places is None else sent.add(places)
        sent.send(graph.buffer)
        logits = graph.replay(sent, numbers)
        handle.finite = [graph.finite[: len(works)].clone()]
        if order is None:
            logits = logits[: len(works)]
        else:
            logits, handle.finite = logits[sent[order]], [graph.finite[sent[order]]]
        self._draw(handle, draws, logits, sent)

    def _replay_cycle(self, graph: VerifyGraph, handle: Handle) -> None:
        """A step of decode works alone, some with drafts. The device verifies while the host makes
        ready what follows: the step before may have left it no time for that."""
        works, sent, plan = handle.plan.works, Upload(self.device), handle.plan
        numbers = graph.add(works, sent)
        sent.send(graph.buffer)
        logits, slots = graph.verify(sent, numbers), sent[numbers.numbers[2]]
        self._sort(handle)
        speculator, cycles, lead = self.speculator, self.captured.cycles, self.rank == 0
        assert speculator is not None and cycles is not None
        judge = cycles.judge(graph)
        if judge is not None:
            accepted = speculator.judge(handle, judge, graph, logits, self.simulated)
            follow = judge.follow
        else:
            branch, rows = self._judge_trees(graph, handle, logits, slots)
            if branch is None:
                return
            accepted = branch.accepted
            kept = partial(cycles.branch(graph).follow, works)
            follow = partial(kept, handle.tokens[0], branch, rows, slots)
        if plan.drafts:
            rest = speculator.replay(handle, accepted, follow, cycles, lead)
            self._unfinished = handle, rest

    def _judge_trees(
        self, graph: VerifyGraph, handle: Handle, logits: Tensor, slots: Tensor
    ) -> tuple[Branch | None, Tensor]:
        """What is kept of the trees that a step verified, None if it did not and nothing is drafted
        behind it; and the row of each draw. logits and slots: of all rows.
        """
        works, sent, plan = handle.plan.works, Upload(self.device), handle.plan
        draws = self.sampler.prepare(handle.wanted.draws, sent)
        claims = None
        if plan.drafts or graph.queries > 1:
            claims = claim(plan, handle.wanted, self.width, sent, self.simulated)
        lies = graph.lies(works)
        places = sent.add(lies)
        sent.send(graph.behind)
        rows = sent[places]
        whole = len(lies) == graph.queries * len(works)  # then all lie together
        logits, handle.finite = logits[: len(lies)] if whole else logits[rows], [graph.finite[rows]]
        branch = self._draw(handle, draws, logits, sent, claims)
        if branch is not None and branch.order is not None and not plan.drafts:
            assert graph.batch is not None
            layers, _ = self._parts(self.caches)
            self.model.move(layers, graph.batch, moves(branch, slots[rows], rows))
        return branch, rows

    def _draw(
        self,
        handle: Handle,
        draws: Draws,
        logits: Tensor,
        sent: Upload,
        claims: Claims | None = None,
    ) -> Branch | None:
        """Draw the step's tokens; which drafts of each work were right, if it drafts. That logits
        are `handle.finite` has been seen.
        """
        front, branch = None, None
        if claims is not None:
            front = fronts(claims, self.last_tokens, self.trees, sent)
        known, nodes = (None, None) if front is None else (front.tokens, front.nodes)
        drawn = self.sampler.draw(logits, draws, sent, known, nodes)
        kept, order = None, None
        if claims is None:
            place = sent[draws.rows]
            place = place if self.width == 1 else place * self.width
            self.last_tokens.index_copy_(0, place, drawn)
        else:
            assert self.speculation is not None
            branch = verify(claims, self.speculation.steps + 1, drawn, front, sent)
            last = drawn[branch.draws[:, -1]]
            self.last_tokens.index_copy_(0, sent[claims.places], last)
            if front is not None:
                handle.accepted, order, kept = [branch.accepted], branch.order, branch.draws
        self.sampler.count(draws, drawn, sent, kept)
        handle.tokens = [drawn if order is None else drawn[order]]
        if order is not None:
            handle.finite = [some[order] for some in handle.finite]
        handle.logprobs = self.sampler.logprobs(logits, draws, drawn, order)
        return branch

    def _run(self, handle: Handle, caches: list[Tensor]) -> None:
        """Any step, op by op."""
        self._sort(handle)
        wanted, sent, speculator = handle.wanted, Upload(self.device), self.speculator
        works = handle.plan.works
        if not (handle.plan.drafts or any(w.length > 1 or w.tokens is not None for w in works)):
            speculator = None  # it decodes as without drafts
        draws = self.sampler.prepare(wanted.draws, sent)
        claims = None
        if speculator is not None:
            claims = claim(handle.plan, wanted, self.width, sent, self.simulated)
            follow = speculator.follow(handle.plan, sent)
        works, ranks = handle.plan.works, self.config.attention_ranks
        spreading = None if ranks == 1 else Spreading.of(works, ranks, sent)
        added = self.inputs.add(self._own(works), sent, trees=self.trees)
        sent.send()
        batch = added.batch(sent, self.states)
        read_last_tokens(batch, self.last_tokens)
        batch.spread = None if spreading is None else spreading.sent(sent)
        for key, kernel in self.bound.stateful.items():
            kernel.prepare(self.states[key], batch)
        layers, behind = self._parts(caches)
        found = self._forward(batch, layers, caches is self.caches, speculator is not None)
        hidden = found  # [logit rows, hidden]
        if speculator is not None:
            hidden = self.model.wanted(found[batch.logit_rows], batch.spread)
        assert hidden.shape[0] == wanted.rows, f"{hidden.shape[0]} rows, {wanted.rows} are due"
        adapters, branch = batch.logit_adapters, None
        if wanted.draws:
            logits = self._logits(hidden, adapters, wanted.draw_rows)
            handle.finite = [finite_rows(logits)]
            branch = self._draw(handle, draws, logits, sent, claims)
            del logits
        for first in range(0, len(wanted.scores), SCORE_ROWS):
            some = slice(first, first + SCORE_ROWS)
            logits = self._logits(hidden, adapters, wanted.score_rows[some])
            handle.scores.append(self.sampler.score(logits, wanted.scores[some]))
            handle.scored.append(finite_rows(logits))
            del logits  # before the next slice's
        if speculator is not None:
            if branch is not None and batch.decode is not None and batch.decode.tree is not None:
                self.model.move(layers, batch, moves(branch, batch.slots))
            if handle.plan.drafts or any(w.tokens is not None for w in works):
                speculator.run(handle, follow, batch, found, branch, sent, behind)

    def _forward(self, batch: Batch, layers: list[Tensor], serves: bool, every: bool) -> Tensor:
        """As of the model. serves: over the caches of requests."""
        graph, prefills = None, self.captured.prefills
        if prefills is not None and serves and batch.prefill is not None:
            graph = prefills.graph_for(batch.num_tokens)
        if graph is None:
            return self.model.forward(batch, layers, every)
        return graph.replay(batch, every)

    def _logits(self, hidden: Tensor, adapters: Tensor | None, rows: list[int]) -> Tensor:
        """Of some of the logit rows."""
        if len(rows) < hidden.shape[0]:  # rows are distinct and rising
            picked = put(rows, np.int64, self.device)
            hidden, adapters = hidden[picked], None if adapters is None else adapters[picked]
        return self.model.logits(hidden, None, adapters)

    @torch.inference_mode()
    def put_adapter(self, message: PutAdapter) -> None:
        """Read an adapter into a slot, on every rank or on none: collective.

        Raises CheckpointError, on every rank alike, if one of them could not read it; the slot is
        then as it was. Steps that were launched before are not disturbed.
        """
        assert self.model.lora is not None, "an engine without slots was sent an adapter"
        self.model.lora.read(message.slot, Path(message.folder), self.comm)

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a launched step's results; steps launched after it are not waited for."""
        if self._unfinished is not None and self._unfinished[0] is handle:
            self._finish()
        return handle.result()

    def close(self) -> None:
        """Leave the group of ranks. Captured steps go first: while one could replay a collective,
        its group does not end.
        """
        self.captured, self._unfinished = Captured(), None
        self.comm.close()

    def warm_up(self) -> None:
        """Run a prefill and a decode step on pages of their own; nothing of them stays. Then
        capture decode steps, where the platform can.

        CheckpointError when they give NaN or an infinity: nothing that is served would be right.
        """
        self._rehearse()
        with self.checking():
            for result in self._first_steps():
                self._check(result)
        if self.config.enable_torch_compile:
            self._compile()
        self.platform.synchronize()
        self.sampler.clear()
        self.last_tokens.zero_()
        shown = self.rank == 0 and not self.capturing.late  # else there is nothing to wait for
        self.captured.capture(self.capturing, progress=shown)

    def _compile(self) -> None:
        """Have torch.compile make its functions, for steps of several rows and of one."""
        from ds_runtime.ops.reference.compiling import compiling

        most = self.config.torch_compile_max_bs
        lengths = {min(most, warm_up_length(self.config, self.context_length)), 1}
        shown = Progress("compiling", len(lengths), "kinds", enabled=self.rank == 0)
        with shown as progress, compiling():
            for length in sorted(lengths, reverse=True):
                for _ in self._first_steps(length):
                    pass
                progress.advance(1)

    def _first_steps(self, length: int | None = None) -> Iterator[StepResult]:
        """Those of `warm_up_steps`, op by op, over caches of their own; results on rank 0."""
        given = self.config, self.context_length, self.width, length
        plans, count = warm_up_steps(*given)
        caches = self._allocate(count, poison=False, quiet=True)
        for plan in plans:
            handle = self._launch(plan, caches)
            if handle.arriving is not None:  # on rank 0; all ranks have its logits
                yield self.collect(handle)

    @torch.inference_mode()
    def _rehearse(self) -> None:
        """Have kernels that compile when they first run compiled together, for all that a step can
        be, op by op and captured.
        """
        with rehearsing(self.bound) as anything:
            if not anything:
                return
            model = self.assembly.model
            limits = StepLimits(
                self.context_length,
                self.width,
                0 if model.indexing is None else model.indexing.top_k,
                model.vocab_size,
                self.assembly.lora is not None,
            )
            caches = self._allocate(PAGES, poison=False, quiet=True)
            with self.model.only(one_of_each_kind(self.bound, model.layers)):
                for plan in covering_steps(self.bound, self.config, limits):
                    self._launch(plan, caches)
                if not self.capturing.late:
                    self.captured.rehearse()
        self.platform.synchronize()
        self.sampler.clear()

    def _check(self, result: StepResult) -> None:
        if any(work.broken is not None for work in result.works):
            raise CheckpointError(
                f"{self.assembly.folder}: the first step gave NaN: a weight is NaN or infinite, "
                f"{self.config.dtype} overflows, or a kernel is at fault; try --dtype float32, or "
                "--pin OP=reference.OP for the kernels that ds-runtime plan names"
            )
