"""Which request computes what in the next step, and what its result means.

Order within a step: running decodes, chunks of running prefills, admissions; each by right of
way (FIFO, or priority and then FIFO). `schedule` for step n + 1 may run before `update` for step
n. What a running request holds is in `engine/schedule/ledger.py` and `kv/rank_pages.py`.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from ds_runtime.engine.messages import Failed, Stats, Submit, Tokens
from ds_runtime.engine.schedule.adapters import Held
from ds_runtime.engine.schedule.chunk_sizes import Sizing, StepRoom
from ds_runtime.engine.schedule.ledger import Holdings
from ds_runtime.engine.schedule.limits import SchedulerLimits, check_params, check_prompt
from ds_runtime.engine.schedule.request import (
    Guided,
    Request,
    State,
    Underway,
    remove,
    right_of_way,
)
from ds_runtime.engine.step.plan import StepPlan, StepResult, Work, WorkResult, arranged
from ds_runtime.errors import RequestError
from ds_runtime.grammar.guide import Followed, Guide
from ds_runtime.kv.rank_pages import Pages


class Scheduler:
    """Requests in, plans out, results in, tokens out. `groups`: the pages of all ranks together, or
    of each group of them where attention is divided by sequences.
    """

    def __init__(self, limits: SchedulerLimits, groups: Sequence[Pages]) -> None:
        self.limits = limits
        self.holdings = Holdings(groups, limits.max_running)
        self.waiting: list[Request] = []  # both in right of way
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._groups = self.holdings.groups
        self._in_flight: deque[tuple[int, list[Request], StepRoom | None]] = deque()
        self._num_submitted = 0
        self._checked: list[int] | None = None  # the prompt that was found good last
        self._num_guided = 0
        self._underway = Underway()
        self._drafts = limits.drafts  # of the step that is planned
        self._sizing = Sizing.of(limits)
        self._pool_tokens = self.holdings.most_pages * limits.page_size  # of one request at most
        self._stats = Stats(pages_total=self.holdings.num_pages)

    # ---- requests come and go ----

    @property
    def has_work(self) -> bool:
        """Whether a request is here, or a launched step whose result is not."""
        return bool(self._requests or self._in_flight)

    @property
    def awaits_token(self) -> bool:
        """Whether a request that a grammar guides has a token under way, or drafts are verified:
        it sits the next step out unless an update comes first.
        """
        needs = self._num_guided > 0 or self.limits.drafts > 0
        return needs and any(r.awaits_token and not r.is_following for r in self.running)

    def submit(
        self, submit: Submit, guide: Guide | None = None, adapter: Held | None = None
    ) -> None:
        """Queue one choice. Raises QueueFullError, or RequestError if it can never run."""
        if submit.prompt is not self._checked:  # choices come in a row, and share the list
            check_prompt(submit.prompt, self.limits, self._pool_tokens)
            self._checked = submit.prompt
        check_params(submit.params, self.limits)
        if submit.rid in self._requests:
            raise RequestError(f"request id {submit.rid!r} is in use: choose another", "rid")
        self.limits.check_queue(len(self.waiting))
        self._num_submitted += 1
        priority = submit.priority if self.limits.policy == "priority" else 0
        # A sequence may be one longer than the KV pool: its last token is never computed.
        limit = min(self.limits.context_length, self._pool_tokens + 1)
        order = (-priority, self._num_submitted)
        request = Request.create(submit, order, self.limits.eos, limit, guide, adapter)
        self._requests[request.rid] = request
        self._num_guided += guide is not None
        insort(self.waiting, request, key=right_of_way)

    def abort(self, rids: Iterable[str]) -> None:
        """Forget requests and free what they hold; results still under way are dropped."""
        for rid in rids:
            if (request := self._requests.get(rid)) is not None:
                self._finish(request)

    def uses(self, adapter: Held) -> int:
        """How many requests are here that asked for an adapter."""
        return sum(r.adapter is adapter for r in self._requests.values())

    def flush(self) -> int:
        """Empty the prefix caches; the number of pages freed."""
        return self.holdings.flush()

    def stats(self) -> Stats:
        """Gauges now and counters since start; `step_seconds` is the loop's to fill."""
        return msgspec.structs.replace(
            self._stats,
            **self.holdings.counts,
            running=len(self.running),
            waiting=len(self.waiting),
            pages_free=self.holdings.num_free,
            pages_cached=self.holdings.num_cached,
        )

    def _finish(self, request: Request) -> None:
        if request.is_running:
            self._release(request)
        else:
            remove(self.waiting, request)
        request.state = State.FINISHED
        del self._requests[request.rid]
        self._num_guided -= request.guide is not None

    def _release(self, request: Request) -> None:
        """Take everything back from a running request."""
        remove(self.running, request)
        self.holdings.release(request)

    # ---- before a step ----

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an update or a submit."""
        budget, pace = self.limits.max_step_tokens, self.limits.pace
        planned: list[Request] = []
        decodes = [r for r in self.running if r.can_decode][:budget]
        coming = min(len(self.running) + len(self.waiting), self.limits.max_running)
        self._drafts = pace.choose(len(decodes), coming) if pace else self.limits.drafts
        plan = StepPlan(step=self._stats.steps, works=[], drafts=self._drafts)
        spare = budget - len(decodes)  # for drafts
        for request in decodes:
            if request.is_running and self._grow(request):
                length = 1 + (self._num_verified(request, spare) if request.num_drafts else 0)
                plan.works.append(self._work(request, length))
                planned.append(request)
                spare -= length - 1
        room = self._prompts(plan, planned, spare + len(decodes) - len(planned))
        if not plan.works:
            return None
        if self.holdings.copying:
            self.holdings.drain(plan)
        if room is not None:
            plan.works, planned = arranged(plan.works, planned)
            room.load.loaded = len(plan.loads)
        self._stats.steps += 1
        self._in_flight.append((plan.step, planned, room))
        return plan

    def _prompts(self, plan: StepPlan, planned: list[Request], budget: int) -> StepRoom | None:
        """Plan chunks of prompts. Returns their room; None without prompts or a gap to keep."""
        begun = [r for r in self.running if not r.on_device]
        if not (begun or self.waiting or self._sizing.gap):
            return None
        room = self._sizing.open(plan)
        for request in begun:
            if budget and not room.is_full:
                budget -= self._prefill(request, budget, plan, planned, room)
        for request in self._admissions() if budget and not room.is_full else ():
            plan.init.append(request.row_init())
            budget -= self._prefill(request, budget, plan, planned, room)
            if not budget or room.is_full:
                break
        return room

    def _prefill(
        self, request: Request, budget: int, plan: StepPlan, planned: list[Request], room: StepRoom
    ) -> int:
        """Plan the next chunk of known tokens; how many that are, 0 where the step is full."""
        left = request.total_len - request.num_computed
        most = min(left, budget, self.limits.prefill_chunk)
        most = self._groups[request.group].reach(request, most)
        others = bool(self.waiting) or any(r.can_prefill for r in self.running if r is not request)
        if length := room.take(request.num_computed, most, others):
            plan.works.append(self._work(request, length))
            planned.append(request)
        return length

    def _work(self, request: Request, length: int) -> Work:
        """The next `length` tokens as a work; counts as computed what is sure to be kept."""
        start, decodes, guide = request.num_computed, request.on_device, request.guide
        stop = start + length
        sample = decodes or stop == request.total_len
        asks_prompt = start + 1 < request.prompt_len and request.wants_prompt_logprobs
        drafts = self._drafts if sample else 0
        if self.holdings.keeps_states:
            self._groups[request.group].advance(request)
        if drafts:  # the draft layer goes on behind the last token
            self._cover(request, length + self.limits.draft_room)
        work = Work(
            rid=request.rid,
            group=request.group,
            row=request.row,
            start=start,
            length=length,
            pages=request.pages.copy(),
            tokens=None if decodes else request.tokens(start, stop),
            sample=sample,
            prompt_logprobs=request.params.prompt_logprobs if asks_prompt else None,
            logprobs=request.params.logprobs if sample else None,
            adapter=-1 if request.adapter is None else request.adapter.slot,
            tell_drafts=drafts > 0 and guide is not None,
            absorbed=not decodes and self._sizing.absorbs(start, length),
        )
        if sample and guide is not None:
            known = length - 1 if decodes else 0
            work.masks = guide.masks[: known + 1]
            while not work.masks[-1]:  # the first never is
                work.masks.pop()
        if self.limits.drafts and not sample:
            (work.next_token,) = request.tokens(stop, stop + 1)
        request.num_computed = start + 1 if decodes else stop
        request.num_in_flight += 1
        if sample:
            request.num_pending += 1
            request.on_device = True
            request.num_drafts, request.drafts, request.draft_parents = drafts, [], []
            request.is_verifying = decodes and length > 1
        return work

    def _num_verified(self, request: Request, spare: int) -> int:
        """How many of its drafts the next step verifies: `spare` at most, and what pages hold."""
        wanted = min(request.num_drafts, spare, request.limit - 1 - request.total_len)
        wanted = self._groups[request.group].reach(request, 1 + wanted) - 1
        return self._cover(request, 1 + wanted) - 1 if wanted > 0 else 0

    def _cover(self, request: Request, count: int) -> int:
        """Pages for the next `count` tokens, as far as they can be spared."""
        count = min(count, request.limit - request.num_computed)
        return self._groups[request.group].cover(request, count)

    def _grow(self, request: Request) -> bool:
        """Room for the next token, by preempting others; False if it was preempted itself."""
        while not self._groups[request.group].grow(request):
            victim = next(r for r in reversed(self.running) if r.group == request.group)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue; it will be computed anew, with the output that it has."""
        assert self._groups[request.group].num_running > 1, "one request alone always fits"
        self._release(request)
        request.state = State.WAITING
        insort(self.waiting, request, key=right_of_way)
        self._stats.preemptions += 1

    def _admissions(self) -> Iterable[Request]:
        """Waiting requests as they start to run, until rows or pages are out. Those whose beginning
        another one is computing are passed over, and read it later.
        """
        for request in self.waiting.copy():
            if request.is_following or request.is_fetching:
                continue
            if not self.holdings.rows or request.num_in_flight:  # its output is not known yet
                return
            if request.is_behind:
                continue
            waited = request.behind is not None
            if self._admit(request):
                yield request
            elif request.is_fetching:
                continue
            elif request.behind is None:
                return
            else:
                self._stats.prefix_waits += not waited

    def _admit(self, request: Request) -> bool:
        """Let it run, if there are pages for all that it has to compute and nobody to wait for."""
        reads_cache = self.holdings.caches and not request.wants_prompt_logprobs
        if not self.holdings.take(request, reads_cache):
            return False
        remove(self.waiting, request)
        request.state = State.RUNNING
        insort(self.running, request, key=right_of_way)
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
            request.admitted = time.monotonic()
            self._stats.prompt_tokens += request.prompt_len
            self._stats.cached_tokens += request.num_computed
            request.cached_by_tier = found = self._groups[request.group].by_tier(request)
            self._stats.cached_host_tokens += found["host"] if found else 0
            self._stats.cached_disk_tokens += found.get("storage", 0) if found else 0
        return True

    # ---- after a step ----

    def update(
        self, plan: StepPlan, result: StepResult, seconds: float | None = None
    ) -> list[Tokens | Failed]:
        """Take a step's result, in the order of the plans; what each request is to be told.
        seconds: that it took, where that is known.
        """
        step, requests, room = self._in_flight.popleft()
        assert step == plan.step == result.step, f"step {result.step} came back, {step} is due"
        if room is not None and seconds is not None:
            self._sizing.note(room, seconds, self._stats)
        messages = list[Tokens | Failed]()
        fresh = list[Guided]()
        for request, work, outcome in zip(requests, plan.works, result.works, strict=True):
            assert request.rid == outcome.rid
            if request.guide is not None and outcome.tokens and not request.is_finished:
                fresh.append(Guided.of(request, work, outcome))
                continue
            request.num_in_flight -= 1
            if request.is_finished:  # aborted, or ended by the step before
                continue
            if work.prompt_logprobs is not None:
                missing = len(request.prompt_logprobs) - work.start - 1
                request.prompt_logprobs += outcome.prompt_logprobs[missing:]
            if work.sample:
                messages += self._take(request, work, outcome, None)
            elif outcome.broken is not None:
                messages.append(self._break(request, outcome.broken))
            elif request.is_running:  # else it was preempted
                self._groups[request.group].share(request, work.start + work.length)
        if fresh:
            self._stats.late_masks += self._underway.begin(fresh)
        return messages + self.followed()

    def followed(self, seconds: float = 0.0) -> list[Tokens | Failed]:
        """Take the results of requests whose guides have come after their tokens; `seconds` to
        wait for the first of them. Those of others are late: they alone sit steps out.
        """
        messages = list[Tokens | Failed]()
        for one in self._underway.ready(seconds):
            one.request.num_in_flight -= 1
            self._stats.mask_seconds += one.following.seconds
            if not one.request.is_finished:
                messages += self._take(one.request, one.work, one.outcome, one.following.found)
        return messages

    def close(self) -> None:
        """Let the threads of guides leave."""
        self._underway.close()

    def _break(self, request: Request, position: int) -> Failed:
        """End a request: the logits for the token at `position` are not finite."""
        self._stats.broken += 1
        self._finish(request)
        self._groups[request.group].discard(request)
        return request.broken(position)

    def _take(
        self, request: Request, work: Work, outcome: WorkResult, followed: Followed | None
    ) -> list[Tokens | Failed]:
        """Append sampled tokens and see whether the request ends with or behind one of them.
        followed: what its guide says of them.
        """
        params, stats, is_first = request.params, self._stats, not request.output
        request.num_pending -= 1
        message, fault = request.take(outcome.tokens, followed)
        kept, drafted = len(message.tokens), work.draws - 1
        broken = None if message.finish or fault else outcome.broken
        assert kept or broken is not None, f"a work of {request.rid} gave no token"
        if request.is_running:
            request.num_computed += kept - 1  # one was counted when the step was planned
            if not request.num_pending:  # else another step was planned behind this one
                request.is_verifying, request.drafts = False, outcome.drafts
                request.draft_parents = outcome.draft_parents
            if broken is None:
                end = work.start + work.length - drafted - 1 + kept
                self._groups[request.group].share(request, end, proved=True)
        stats.generated_tokens += kept
        if drafted:
            stats.verified += 1
            stats.draft_tokens += drafted
            ended = message.finish == "stop" or bool(fault)
            right = (kept if ended else len(outcome.tokens)) - (broken is None)
            stats.accepted_tokens += right
        if params.logprobs is not None:
            message.logprobs = outcome.logprobs[:kept]
        if params.prompt_logprobs is not None and is_first:
            message.prompt_logprobs = request.prompt_logprobs
        if fault:
            self._finish(request)
            assert request.guide is not None
            return [Failed(request.rid, "invalid", fault, request.guide.param)]
        if broken is not None:
            failed = self._break(request, broken)
            return [message, failed] if kept else [failed]
        if message.finish:
            self._finish(request)
        return [message]
