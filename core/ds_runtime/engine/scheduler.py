"""Which request computes what in the next step, and what its result means.

Order within a step: running decodes, chunks of running prefills, admissions; each by right of
way (FIFO, or priority and then FIFO). `schedule` for step n + 1 may run before `update` for step
n. What a running request holds is in `engine/holdings.py`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

import msgspec

from ds_runtime.engine.holdings import Holdings
from ds_runtime.engine.limits import SchedulerLimits, check_submit
from ds_runtime.engine.messages import Stats, Submit, Tokens
from ds_runtime.engine.pages import PagePool
from ds_runtime.engine.prefix import PrefixCache
from ds_runtime.engine.request import Group, Request, State
from ds_runtime.engine.step import StepPlan, StepResult, Work, WorkResult
from ds_runtime.errors import QueueFullError, RequestError

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """Requests in, plans out, results in, tokens out. `prefix` None: no prefix cache."""

    def __init__(
        self, limits: SchedulerLimits, pool: PagePool, prefix: PrefixCache | None = None
    ) -> None:
        self.limits = limits
        self.holdings = Holdings(pool, prefix, limits.max_running, limits.page_size)
        self.waiting: list[Request] = []  # both in right of way
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._groups: dict[str, Group] = {}
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        self._num_submitted = 0
        self._stats = Stats(pages_total=pool.num_pages)

    # ---- requests come and go ----

    @property
    def has_work(self) -> bool:
        """Whether a request is here, or a launched step whose result is not."""
        return bool(self._requests or self._in_flight)

    def submit(self, submit: Submit) -> None:
        """Queue one choice. Raises QueueFullError, or RequestError if it can never run."""
        check_submit(submit, self.limits, self._pool_tokens)
        if submit.rid in self._requests:
            raise RequestError(f"request id {submit.rid!r} is in use: choose another", "rid")
        if len(self.waiting) >= self.limits.queue_limit:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, the limit is "
                f"{self.limits.queue_limit} (--queue-limit): try again later"
            )
        self._num_submitted += 1
        priority = submit.priority if self.limits.policy == "priority" else 0
        # A sequence may be one longer than the KV pool: its last token is never computed.
        limit = min(self.limits.context_length, self._pool_tokens + 1)
        order = (-priority, self._num_submitted)
        request = Request.create(submit, order, self.limits.eos, limit)
        if submit.group:
            request.group = self._groups.setdefault(submit.group, Group(submit.group))
            request.group.num_members += 1
        self._requests[request.rid] = request
        self._enqueue(request)

    def abort(self, rids: Iterable[str]) -> None:
        """Forget requests and free what they hold; results still under way are dropped."""
        for rid in rids:
            if (request := self._requests.get(rid)) is not None:
                self._finish(request)

    def flush(self) -> int:
        """Empty the prefix cache; the number of pages freed."""
        return self.holdings.flush()

    def stats(self) -> Stats:
        """Gauges now and counters since start; `step_seconds` is the loop's to fill."""
        return msgspec.structs.replace(
            self._stats,
            running=len(self.running),
            waiting=len(self.waiting),
            pages_free=self.holdings.pool.num_free,
            pages_cached=self.holdings.num_cached,
        )

    @property
    def _pool_tokens(self) -> int:
        return self.holdings.pool.num_pages * self.limits.page_size

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)

    def _finish(self, request: Request) -> None:
        if request.is_running:
            self._release(request)
        else:
            _remove(self.waiting, request)
        request.state = State.FINISHED
        del self._requests[request.rid]
        if (group := request.group) is not None:
            group.num_members -= 1
            if group.leader is request:
                group.leader = None
            if group.num_members == 0:
                del self._groups[group.name]

    def _release(self, request: Request) -> None:
        """Take everything back from a running request."""
        _remove(self.running, request)
        self.holdings.release(request)

    # ---- before a step ----

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an update or a submit."""
        budget = self.limits.max_step_tokens
        plan = StepPlan(step=self._stats.steps, works=[])
        planned: list[Request] = []
        for request in [r for r in self.running if r.can_decode][:budget]:
            if request.is_running and self._grow(request):
                plan.works.append(self._work(request, 1))
                planned.append(request)
        budget -= len(planned)
        for request in self.running:
            if budget and request.can_prefill:
                budget -= self._prefill(request, budget, plan, planned)
        for request in self._admissions() if budget else ():
            plan.init.append(request.row_init())
            budget -= self._prefill(request, budget, plan, planned)
            if not budget:
                break
        if not plan.works:
            return None
        self._stats.steps += 1
        self._in_flight.append((plan.step, planned))
        return plan

    def _prefill(
        self, request: Request, budget: int, plan: StepPlan, planned: list[Request]
    ) -> int:
        """Plan the next chunk of known tokens; how many that are."""
        left = request.total_len - request.num_computed
        length = min(left, budget, self.limits.prefill_chunk)
        plan.works.append(self._work(request, length))
        planned.append(request)
        return length

    def _work(self, request: Request, length: int) -> Work:
        """The next `length` tokens as a work; counts them as computed."""
        start = request.num_computed
        stop = start + length
        sample = stop == request.total_len
        asks_prompt = request.wants_prompt_logprobs and start + 1 < request.prompt_len
        work = Work(
            rid=request.rid,
            row=request.row,
            start=start,
            length=length,
            pages=request.pages.copy(),
            tokens=None if request.on_device else request.tokens(start, stop),
            sample=sample,
            prompt_logprobs=request.params.prompt_logprobs if asks_prompt else None,
            logprobs=request.params.logprobs if sample else None,
        )
        request.num_computed = stop
        request.num_in_flight += 1
        if sample:
            request.num_pending += 1
            request.on_device = True
        return work

    def _grow(self, request: Request) -> bool:
        """Room for the next token, by preempting others; False if it was preempted itself."""
        while not self.holdings.grow(request):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue; it will be computed anew, with the output that it has."""
        assert len(self.running) > 1, "one request alone always fits"
        self._release(request)
        request.state = State.WAITING
        self._enqueue(request)
        self._stats.preemptions += 1

    def _admissions(self) -> Iterable[Request]:
        """Waiting requests as they start to run, until rows or pages are out."""
        for request in self.waiting.copy():
            if not self.holdings.rows or request.num_in_flight:  # its output is not known yet
                return
            if self._awaits_leader(request):
                continue
            if not self._admit(request):
                return
            yield request

    def _awaits_leader(self, request: Request) -> bool:
        """Whether a sibling is to compute the shared prompt first, so that this one reads it."""
        group, can_share = request.group, request.prompt_len > self.limits.page_size
        if group is None or group.is_computed or not can_share:
            return False
        if group.leader is None:
            group.leader = request
        return group.leader is not request and self._reads_cache(request)

    def _reads_cache(self, request: Request) -> bool:
        return self.holdings.prefix is not None and not request.wants_prompt_logprobs

    def _admit(self, request: Request) -> bool:
        """Let it run, if there are pages for all that it has to compute."""
        # One page per running request stays in reserve: fewer preemptions right afterwards.
        if not self.holdings.take(request, self._reads_cache(request), reserve=len(self.running)):
            return False
        _remove(self.waiting, request)
        request.state = State.RUNNING
        insort(self.running, request, key=_order)
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
            self._stats.prompt_tokens += request.prompt_len
            self._stats.cached_tokens += request.num_computed
        return True

    # ---- after a step ----

    def update(self, plan: StepPlan, result: StepResult) -> list[Tokens]:
        """Take a step's result, in the order of the plans; what each request is to be told."""
        step, requests = self._in_flight.popleft()
        assert step == plan.step == result.step, f"step {result.step} came back, {step} is due"
        messages = []
        for request, work, outcome in zip(requests, plan.works, result.works, strict=True):
            assert request.rid == outcome.rid
            request.num_in_flight -= 1
            if request.is_finished:  # aborted, or ended by the step before
                continue
            if request.is_running:  # else preempted: its pages are gone
                self._computed(request, work.start + work.length)
            if work.prompt_logprobs is not None:
                missing = len(request.prompt_logprobs) - work.start - 1
                request.prompt_logprobs += outcome.prompt_logprobs[missing:]
            if work.sample:
                messages.append(self._take(request, outcome))
        return messages

    def _computed(self, request: Request, end: int) -> None:
        """The KV of tokens below `end` is there: others may read it."""
        if request.group is not None and end >= request.prompt_len:
            request.group.is_computed = True
        self.holdings.share(request, end)

    def _take(self, request: Request, outcome: WorkResult) -> Tokens:
        """Append a sampled token and see whether the request ends with it."""
        token, params = outcome.token, request.params
        assert token is not None
        request.num_pending -= 1
        request.output.append(token)
        self._stats.generated_tokens += 1
        message = Tokens(rid=request.rid, tokens=[token], cached_tokens=request.cached_tokens or 0)
        if params.logprobs is not None:
            assert outcome.logprob is not None
            message.logprobs = [outcome.logprob]
        if params.prompt_logprobs is not None and len(request.output) == 1:
            message.prompt_logprobs = request.prompt_logprobs
        num_output = len(request.output)
        if token in request.stop_ids and num_output > params.min_tokens:
            message.finish, message.stop_token = "stop", token
        elif request.prompt_len + num_output >= request.max_len:
            message.finish = "length"
        if message.finish:
            self._finish(request)
        return message


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _remove(ordered: list[Request], request: Request) -> None:
    index = bisect_left(ordered, request.order, key=_order)
    assert ordered[index] is request
    del ordered[index]
