"""One rank's device side: weights, caches, step state; a plan in, tokens out.

`launch` queues a step without waiting for the device, `collect` waits for its results, so that
the loop may schedule the next step in between.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_runtime.assemble import Assembly
from ds_runtime.engine.batch import build_batch, num_logit_rows
from ds_runtime.engine.memory import KvMemory, context_length, kv_memory
from ds_runtime.engine.sampler import Draw, Drawn, LogprobGroup, Sampler
from ds_runtime.engine.step import RowInit, StepPlan, StepResult, Work, WorkResult
from ds_runtime.errors import CheckpointError
from ds_runtime.model.weights import load_model
from ds_runtime.ops.batch import Limits
from ds_runtime.ops.bound import BoundOps
from ds_runtime.ops.spec import load_attr
from ds_runtime.platform.spec import Communicator
from ds_runtime.progress import Progress
from ds_runtime.sampling_params import SamplingParams

_SCORE_ROWS = 64  # prompt positions whose logits are held at a time: 33 MB at 129 280 tokens


@dataclass(slots=True)
class Handle:
    """A launched step: what its results are made of, still on the device."""

    plan: StepPlan
    drawn: Drawn | None = None
    draw_works: list[int] = field(default_factory=list)  # index of the work, per draw
    scores: list[list[LogprobGroup]] = field(default_factory=list)  # per _SCORE_ROWS scored rows
    score_works: list[int] = field(default_factory=list)  # index of the work, per scored row


class Runner:
    """Loads the model of one rank and runs steps.

    Raises ConfigError when the KV cache does not fit, CheckpointError for bad weights. `poison`
    fills the caches with NaN, so that reading a page before writing it shows.
    """

    def __init__(
        self, assembly: Assembly, comm: Communicator, rank: int = 0, *, poison: bool = False
    ) -> None:
        self.assembly = assembly
        self.comm = comm
        self.rank = rank
        self.config = assembly.config
        self.platform = assembly.platform
        self.device = self.platform.device(rank)
        self.context_length = context_length(assembly)
        self.max_pages = -(-self.context_length // self.config.page_size)
        self.bound = BoundOps(assembly.binding)
        self.model = load_model(assembly, self.bound, comm, self.device, progress=rank == 0)
        self.states = {
            key: kernel.state(self._limits()) for key, kernel in self.bound.stateful.items()
        }
        self.sampler = Sampler(
            self.bound.at(-1, "sampler"),
            self.config.max_running,
            assembly.model.vocab_size,
            self.device,
        )
        self.last_tokens = torch.zeros(
            self.config.max_running, dtype=torch.int64, device=self.device
        )
        self.memory = self._plan_memory()
        self.num_pages = self.memory.pages
        self.caches = self._allocate(self.num_pages, poison)

    def _limits(self) -> Limits:
        return Limits(
            max_tokens=self.config.max_step_tokens,
            max_sequences=self.config.max_running,
            max_pages_per_sequence=self.max_pages,
            page_size=self.config.page_size,
            heads=self.assembly.model.heads // self.config.tp,
            device=self.device,
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_pages * self.config.page_size

    def _plan_memory(self) -> KvMemory:
        """The pages that every rank can hold: collective."""
        here = (socket.gethostname(), str(self.device))
        sharing = self.comm.gather_objects(here).count(here)  # and all have loaded by now
        free = self.platform.memory(self.rank).free // sharing
        mine = kv_memory(self.assembly, free, self.context_length)
        pages = self.comm.gather_objects(mine.pages)
        fewest = min(pages)
        if fewest < self.max_pages:
            raise mine.too_small(fewest, self.context_length)
        return KvMemory(fewest, mine.page_bytes, free, mine.explicit, mine.page_size)

    def _allocate(self, pages: int, poison: bool, quiet: bool = False) -> list[Tensor]:
        """One cache per layer."""
        layout, facts = self.bound.layout, self.bound.base
        allocate = load_attr(layout.allocate)
        layers = self.assembly.model.layers
        caches: list[Tensor] = []
        share = pages * self.memory.page_bytes // layers
        enabled = self.rank == 0 and not quiet
        with Progress("allocating KV cache", share * layers, enabled=enabled) as progress:
            for _ in range(layers):
                cache = allocate(pages, facts, self.device)
                if poison and cache.is_floating_point():
                    cache.fill_(float("nan"))
                caches.append(cache)
                progress.advance(share)
        return caches

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step. Every rank launches the same plans in the same order."""
        return self._launch(plan, self.caches)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, caches: list[Tensor]) -> Handle:
        for init in plan.init:
            self.sampler.start(init)
        batch = build_batch(
            plan,
            self.config.page_size,
            self.max_pages,
            self.last_tokens,
            self.device,
            self.config.prefix_chunk,
        )
        batch.states = self.states
        for key, kernel in self.bound.stateful.items():
            kernel.prepare(self.states[key], batch)
        hidden = self.model.forward(batch, caches)  # [logit rows, hidden]
        return self._sample(plan, hidden)

    def _sample(self, plan: StepPlan, hidden: Tensor) -> Handle:
        """Sort the logit rows, which come work by work, into draws and prompt scores."""
        handle = Handle(plan)
        draws: list[Draw] = []
        draw_rows: list[int] = []
        scores: list[tuple[int, int]] = []  # (token, alternatives)
        score_rows: list[int] = []
        end = 0
        for i, work in enumerate(plan.works):
            begin, end = end, end + num_logit_rows(work)
            if work.prompt_logprobs is not None:
                prompt = self.sampler.row(work.row).prompt
                targets = prompt[work.start + 1 : work.start + work.length + 1]
                scores += [(token, work.prompt_logprobs) for token in targets]
                score_rows += range(begin, begin + len(targets))
                handle.score_works += [i] * len(targets)
            if work.sample:
                draws.append(Draw(work.row, work.start + work.length, work.logprobs))
                draw_rows.append(end - 1)
                handle.draw_works.append(i)
        assert end == hidden.shape[0], f"{hidden.shape[0]} hidden rows, {end} are due"
        if draws:
            logits = self.model.logits(self._pick(hidden, draw_rows))
            handle.drawn = self.sampler.draw(logits, draws)
            index = torch.tensor([d.row for d in draws], dtype=torch.int64, device=self.device)
            self.last_tokens.index_copy_(0, index, handle.drawn.tokens)
            del logits
        for first in range(0, len(scores), _SCORE_ROWS):
            some = slice(first, first + _SCORE_ROWS)
            logits = self.model.logits(self._pick(hidden, score_rows[some]))
            handle.scores.append(self.sampler.score(logits, scores[some]))
            del logits  # before the next slice's
        return handle

    def _pick(self, hidden: Tensor, rows: list[int]) -> Tensor:
        if len(rows) == hidden.shape[0]:  # rows are distinct and rising
            return hidden
        return hidden[torch.tensor(rows, dtype=torch.int64, device=self.device)]

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a launched step and bring its results to the host."""
        works = [WorkResult(rid=w.rid) for w in handle.plan.works]
        if handle.drawn is not None:
            for i, token in zip(handle.draw_works, handle.drawn.tokens.tolist(), strict=True):
                works[i].token = token
            for group in handle.drawn.logprobs:
                for owner, entry in group.fetch():
                    works[handle.draw_works[owner]].logprob = entry
        for number, groups in enumerate(handle.scores):
            entries = dict(pair for group in groups for pair in group.fetch())
            owners = handle.score_works[number * _SCORE_ROWS :]
            for row in range(len(entries)):
                works[owners[row]].prompt_logprobs.append(entries[row])
        return StepResult(step=handle.plan.step, works=works)

    def warm_up(self) -> None:
        """Run a prefill and a decode step on pages of their own; nothing of them stays.

        CheckpointError when they give NaN: then nothing that is served would be right.
        """
        length = min(self.context_length - 1, self.config.prefill_chunk, 2 * self.config.page_size)
        length = max(1, min(length, self.config.max_step_tokens))
        pages = list(range(length // self.config.page_size + 1))
        caches = self._allocate(len(pages), poison=False, quiet=True)
        prompt = [0] * length
        init = RowInit(row=0, params=SamplingParams(), seed=0, choice=0, prompt=prompt)
        prefill = Work(rid="", row=0, start=0, length=length, pages=pages, tokens=prompt)
        decode = Work(rid="", row=0, start=length, length=1, pages=pages)
        prefill.logprobs = decode.logprobs = 1  # over the whole vocabulary: one NaN spoils them
        for plan in (
            StepPlan(step=-2, works=[prefill], init=[init]),
            StepPlan(step=-1, works=[decode]),
        ):
            self._check(self.collect(self._launch(plan, caches)))
        self.platform.synchronize()
        self.sampler.clear()
        self.last_tokens.zero_()

    def _check(self, result: StepResult) -> None:
        entry = result.works[0].logprob
        assert entry is not None
        if math.isnan(entry.logprob):
            raise CheckpointError(
                f"{self.assembly.folder}: the first step gave NaN: a weight is NaN or infinite, "
                f"{self.config.dtype} overflows, or a kernel is at fault; try --dtype float32, or "
                "--pin OP=reference.OP for the kernels that ds-runtime plan names"
            )
