"""One rank's device side: weights, caches, step state; a plan in, tokens out.

`launch` queues a step without waiting for the device, `collect` waits for its results, so that
the loop may schedule the next step in between.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from ds_runtime.assembly.result import Assembly
from ds_runtime.common.progress import Progress
from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.capture.recorder import rehearsing
from ds_runtime.engine.device import first_steps
from ds_runtime.engine.device.op_by_op import OpByOp
from ds_runtime.engine.device.parts import Parts
from ds_runtime.engine.device.precompile import Ahead
from ds_runtime.engine.device.programs import Programs, Rest
from ds_runtime.engine.device.waits import Waits
from ds_runtime.engine.speculate.branching import branching
from ds_runtime.engine.step.inputs import StepInputs
from ds_runtime.engine.step.plan import PutAdapter, StepPlan, StepResult
from ds_runtime.engine.step.result import Handle
from ds_runtime.engine.step.sampler import Sampler
from ds_runtime.errors import CheckpointError, DsRuntimeError, KernelError
from ds_runtime.kv.budget import KvMemory, Room, context_length, kv_memory
from ds_runtime.kv.caches import allocate, copy_states, with_pages
from ds_runtime.kv.tiers.copies import HostCopies
from ds_runtime.kv.tiers.pace import BringPace
from ds_runtime.kv.tiers.room import HostRoom
from ds_runtime.ops.batch import Limits
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.parallel.world import World
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
        world: World,
        local_rank: int = 0,
        local_ranks: int | None = None,
        *,
        poison: bool = False,
        bound: BoundOps | None = None,
    ) -> None:
        self.assembly = assembly
        self.world, self.comm = world, world.everyone
        self.rank = rank = world.rank
        self.local_rank, self.local_ranks = local_rank, local_ranks or world.size
        self.config = assembly.config
        self.platform = assembly.platform
        self.device = self.platform.device(local_rank)
        self.waits = Waits(self.comm, self.platform.asynchronous, self.device)
        self.context_length = context_length(assembly)
        self.max_pages = -(-self.context_length // self.config.page_size)
        self.bound = bound or BoundOps(assembly.binding)
        self.speculation = Speculation.of(self.config)
        self.width = self.speculation.tokens if self.speculation else 1
        idle = self.platform.memory(local_rank)
        self.comm.gather_objects(None)  # nobody loads before all have looked
        captures = self.bound.base.graph_capture
        most = self.config.max_step_tokens if rank == 0 else 0
        with Ahead(self.bound, self.device, most, idle.total), self.checking():
            given = assembly, self.bound, world, self.device
            self.model = load_model(*given, progress=rank == 0, local_rank=local_rank)
            draft = load_draft(assembly, self.model, self.bound, self.device, progress=rank == 0)
        self._unfinished: tuple[Handle, Rest] | None = None
        if assembly.lora is not None:
            for slot, spec in enumerate(assembly.lora.adapters):
                self.put_adapter(PutAdapter(slot, str(spec.folder)))
        self.sampler = Sampler(
            self.bound.at(-1, "sampler"),
            self.config.max_running_requests,
            assembly.model.vocab_size,
            self.device,
            self.width,
        )
        places = (self.config.max_running_requests + 1) * self.width  # one row is of no request
        self.last_tokens = torch.zeros(places, dtype=torch.int64, device=self.device)
        inputs = StepInputs(
            self.config.page_size,
            self.max_pages,
            self.context_length,
            self.last_tokens,
            self.config.prefix_chunk,
            self.width,
            assembly.cache_sizes.state > 0,
            self.config.batch_invariant,
        )
        self.draft = draft
        self.memory = self._plan_memory(idle.free)
        self.num_pages = self.memory.pages
        pages, shown = self.num_pages + captures, rank == 0
        self.caches = allocate(assembly.caches, pages, self.memory.states, self.device, shown)
        for cache in self.caches if poison else ():
            cache.fill_(float("nan") if cache.is_floating_point() else 255)
        for cache in self.caches if captures else ():
            cache[-1].zero_()  # the spare page
        self.below: HostCopies | None = None
        self.pace: BringPace | None = None  # of what lies below the device
        if self.config.enable_hierarchical_cache:
            host = HostRoom.of(self.config, self.memory)
            host.check(self.config, self.memory, self.platform.own_memory)
            try:
                copies = self.platform.page_copies(local_rank)
                self.below = HostCopies(self.caches, host.pages, host.states, copies)
            except (RuntimeError, MemoryError) as e:
                raise host.refused(e) from e
        self.parts = self._make_parts(inputs)
        self.programs = Programs(
            assembly, self.parts, world.size, local_rank, captures, self.checking
        )

    def checking(self) -> AbstractContextManager[None]:
        """Within, kernels that break their contract are named."""
        return self.bound.checking(self.assembly.plugins.owners)

    def _limits(self) -> Limits:
        alone, most = self.config.batch_invariant, self.config.max_step_tokens
        return Limits(
            max_tokens=most,
            max_sequences=most if alone else self.config.max_running_requests,
            max_pages_per_sequence=self.max_pages,
            page_size=self.config.page_size,
            heads=self.assembly.model.heads // self.assembly.mesh.attn_tp,
            device=self.device,
            max_queries=1 if alone else self.width,
        )

    def _make_parts(self, inputs: StepInputs) -> Parts:
        limits, spare = self._limits(), inputs.last_tokens
        ways, rows = branching(self.speculation), spare.shape[0] // self.width
        return Parts(
            model=self.model,
            draft=self.draft,
            sampler=self.sampler,
            inputs=inputs,
            kernels=self.bound.stateful,
            states={key: kernel.state(limits) for key, kernel in self.bound.stateful.items()},
            caches=self.caches,
            shape=self.speculation,
            branched=ways.branched(rows, self.width, self.device) if ways else None,
            limits=limits,
            spare_page=self.num_pages,
            vocab=self.assembly.model.vocab_size,
            device=self.device,
            adapts=self.assembly.lora is not None,
            leads=self.rank == 0,
            halves=self.assembly.halves,
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, in all groups together where each has sequences of its
        own.
        """
        return self.num_pages * self.config.page_size * self.assembly.mesh.attn_dp

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
        fewest = mine.fewest(self.comm.gather_objects(mine))
        if fewest.pages < self.max_pages:
            raise mine.too_small(fewest.pages, self.context_length)
        if mine.warning and self.rank == 0:
            print(f"warning: {mine.warning}", file=sys.stderr, flush=True)
        return fewest

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step. Every rank launches the same plans in the same order."""
        try:
            self._finish()
            return self._launch(plan)
        except BaseException as e:
            prompts = any(work.tokens is not None for work in plan.works)
            e.add_note("in a step with prompts" if prompts else "in a decode step")
            if said := self.bound.suspect(self.assembly.plugins.owners, e):
                e.add_note(said)
            self._blame(plan, e)
            raise

    def _blame(self, plan: StepPlan, error: BaseException) -> None:
        """Raise KernelError if a kernel is why a step failed: it fails once more, checked. Where
        there are several ranks, the others would have to take part in that."""
        if isinstance(error, KeyboardInterrupt | DsRuntimeError) or self.comm.size > 1:
            return
        try:
            with self.checking():
                self._launch(plan)
        except KernelError as blamed:
            raise blamed from error
        except BaseException:
            return

    def _finish(self) -> None:
        """Draft what the last step launched is to draft: wait for what the device has verified."""
        if self._unfinished is None:
            return
        (handle, rest), self._unfinished = self._unfinished, None
        with torch.inference_mode():
            rest()
        if self.rank == 0 and handle.arriving is None:
            handle.download()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, alone: OpByOp | None = None) -> Handle:
        """alone: what runs it, over caches of its own."""
        for init in plan.init:
            self.sampler.start(init)
        if self.below is not None or plan.copies:
            self.copy(plan)
        handle = Handle(plan)
        if self.waits.serves:
            self.waits.begin(plan.step)
        rest, replays = self.programs.launch(handle, alone)
        if self.waits.serves:
            self.waits.end()
        if rest is None and self.rank == 0 and handle.arriving is None:
            handle.download()  # in front of saves, which nobody waits for who reads a result
        if self.below is not None:
            self.below.end()
        if rest is not None:
            if self.rank == 0 and replays:
                self._unfinished = handle, rest
                return handle
            rest()  # another rank has nothing else to do, and rank 0 may wait for it
        if self.rank == 0 and handle.arriving is None:
            handle.download()  # nobody collects elsewhere
        return handle

    @torch.inference_mode()
    def copy(self, plan: StepPlan) -> None:
        """What a step begins with."""
        group = self.parts.exchange.group
        if self.below is not None:
            saves = [(page, slot) for at, page, slot in plan.saves if at == group]
            loads = [(slot, page) for at, slot, page in plan.loads if at == group]
            self.below.begin(saves, loads, plan.hurried)
        if plan.copies:
            self.move_states([(s, t) for at, s, t in plan.copies if at == group])
        if self.below is not None and not plan.works:
            self.below.end()  # there is no step that does

    def move_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Make copies of states that a plan names."""
        if self.below is None:
            copy_states(self.caches, copies)
        else:
            self.below.move_states(copies)

    def _over(self, pages: int) -> OpByOp:
        """What runs whole steps over pages of their own, before there are requests."""
        caches = with_pages(self.caches, pages, self.device)
        return OpByOp(replace(self.parts, caches=caches, halves=None))

    @torch.inference_mode()
    def put_adapter(self, message: PutAdapter) -> None:
        """Read an adapter into a slot, on every rank or on none: collective.

        Raises CheckpointError, on every rank alike, if one of them could not read it; the slot is
        then as it was. Steps that were launched before are not disturbed.
        """
        assert self.model.lora is not None, "an engine without slots was sent an adapter"
        self._finish()  # as other ranks have: collectives keep their order
        self.model.lora.read(message.slot, Path(message.folder), self.comm)

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a launched step's results; steps launched after it are not waited for."""
        if self._unfinished is not None and self._unfinished[0] is handle:
            self._finish()
        return handle.result()

    def close(self, alone: bool = False) -> None:
        """Leave the group of ranks, after what others have queued. Captured steps go first: while
        one could replay a collective, its group does not end. alone: the others have been ended.
        """
        if not alone:
            self._finish()
        self.programs.forget()
        self.world.close()

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
        if self.below is not None:
            self.pace = self._measure(self.below)
        self.platform.synchronize()
        self.sampler.clear()
        self.last_tokens.zero_()
        if self.model.counts is not None:
            self.model.counts.clear()
        shown = self.rank == 0 and not self.programs.late  # else there is nothing to wait for
        self.programs.capture(progress=shown)

    def _measure(self, below: HostCopies) -> BringPace:
        """What a page takes to compute, and to come back: collective."""
        config, size = self.config, self.config.page_size
        most = min(config.chunked_prefill_size, config.max_step_tokens // config.groups)
        length = max(1, min(most, self.context_length - 1))
        took = list[float]()
        for _ in range(2):
            self.platform.synchronize()
            begin = time.perf_counter()
            for _result in self._first_steps(length):
                pass
            self.platform.synchronize()
            took.append(time.perf_counter() - begin)
        return BringPace(min(took) * size / length, below.seconds(-(-length // size)))

    def _compile(self) -> None:
        """Have torch.compile make its functions, for steps of several rows and of one."""
        from ds_runtime.ops.reference.compiling import compiling

        most = self.config.torch_compile_max_bs
        lengths = {min(most, first_steps.warm_up_length(self.config, self.context_length)), 1}
        shown = Progress("compiling", len(lengths), "kinds", enabled=self.rank == 0)
        with shown as progress, compiling():
            for length in sorted(lengths, reverse=True):
                for _ in self._first_steps(length):
                    pass
                progress.advance(1)

    def _first_steps(self, length: int | None = None) -> Iterator[StepResult]:
        """Those of `warm_up_steps`, op by op, over pages of their own; results on rank 0."""
        plans, count = first_steps.warm_up_steps(
            self.config, self.context_length, self.width, length
        )
        alone = self._over(count)
        for plan in plans:
            handle = self._launch(plan, alone)
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
            limits = first_steps.StepLimits(
                self.context_length,
                self.width,
                0 if model.indexing is None else model.indexing.top_k,
                model.vocab_size,
                self.assembly.lora is not None,
            )
            alone = self._over(first_steps.PAGES)
            with self.model.only(first_steps.one_of_each_kind(self.bound, model.layers)):
                for plan in first_steps.covering_steps(self.bound, self.config, limits):
                    self._launch(plan, alone)
                self.programs.rehearse()
        self.platform.synchronize()
        self.sampler.clear()

    def _check(self, result: StepResult) -> None:
        if any(work.broken is not None for work in result.works):
            raise CheckpointError(
                f"{self.assembly.folder}: the first step gave NaN: a weight is NaN or infinite, "
                f"{self.config.dtype} overflows, or a kernel is at fault. Try --dtype float32, or "
                "--pin OP=reference.OP for the kernels that ds-runtime plan names"
            )
