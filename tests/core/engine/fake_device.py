"""A fake device for the scheduler: its cache keeps token ids, its model is a hash of the prefix.

Every work is checked against the sequence that its row stands for, through the page table, so a
stale page, a wrong position or a lost token cannot pass unseen. Free pages are poisoned.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ds_runtime.engine.messages import Submit, TokenLogprob, Tokens
from ds_runtime.engine.schedule.limits import SchedulerLimits
from ds_runtime.engine.schedule.scheduler import Scheduler
from ds_runtime.engine.step.plan import RowInit, StepPlan, StepResult, Work, WorkResult
from ds_runtime.kv.pages import PagePool
from ds_runtime.kv.prefix import PrefixCache
from ds_runtime.kv.rank_pages import Pages
from ds_runtime.kv.snapshots import Snapshots
from ds_runtime.kv.tiers.host import THROUGH, HostTier, own_root
from ds_runtime.sampling_params import SamplingParams

VOCAB = 40
LONG = list(range(1, 38))  # 9 pages of 4 tokens, and a token
EOS = 3
POISON = -7


def next_token(prefix, seed, choice, forbidden=frozenset()):
    """The token that follows `prefix` in this stream: a pure function."""
    for salt in range(VOCAB * 4):
        token = zlib.crc32(repr((prefix, seed, choice, salt)).encode()) % VOCAB
        if token not in forbidden:
            return token
    raise AssertionError("everything is forbidden")


def logprob(prefix, token):
    return -(zlib.crc32(repr((prefix, token)).encode()) % 1000) / 100


@dataclass
class Answer:
    """All that one request was sent, or is to be sent."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float | None] | None = None
    finish: str | None = None
    stop_token: int | None = None


def alone(submit: Submit, context: int, pool_tokens: int, eos=(EOS,), follow=next_token) -> Answer:
    """What the request gets if the fake model runs it by itself, token by token. follow: the model,
    as `next_token`.
    """
    p, answer = submit.params, Answer()
    stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(eos))
    sequence, limit = list(submit.prompt), min(context, pool_tokens + 1)
    if p.prompt_logprobs is not None:
        answer.prompt_logprobs = [None] + [
            logprob(sequence[:i], sequence[i]) for i in range(1, len(sequence))
        ]
    while answer.finish is None:
        masked = stops if len(answer.tokens) < p.min_tokens else set()
        token = follow(sequence, submit.seed, submit.choice, masked)
        if p.logprobs is not None:
            answer.logprobs.append(logprob(sequence, token))
        sequence.append(token)
        answer.tokens.append(token)
        if token in stops and len(answer.tokens) > p.min_tokens:
            answer.finish, answer.stop_token = "stop", token
        elif len(answer.tokens) == p.max_tokens or len(sequence) == limit:
            answer.finish = "length"
    return answer


@dataclass
class Row:
    init: RowInit
    sequence: list[int]  # prompt and output, as sampled here


class FakeDevice:
    """follow: the model token by token, as `next_token`."""

    follow = staticmethod(next_token)

    def __init__(self, num_pages: int, page_size: int, max_running: int, ranks: int = 1) -> None:
        self.page_size = page_size
        self.caches = [[[POISON] * page_size for _ in range(num_pages)] for _ in range(ranks)]
        self.rows: dict[int, Row] = {}
        self.last_tokens = [POISON] * max_running
        self.drafts: dict[int, list[int]] = {}  # of a row, behind its last token
        self.host: dict[tuple[int, int], list[int]] = {}  # by rank and slot

    def prepare(self, rig: Rig) -> None:
        """The rig is there."""

    def poison(self, rank, pages) -> None:
        for page in pages:
            self.caches[rank][page] = [POISON] * self.page_size

    def save(self, plan: StepPlan) -> None:
        for group, page, slot in plan.saves:
            self.host[group, slot] = [*self.caches[group][page]]

    @staticmethod
    def saves_late(plan: StepPlan) -> bool:
        """As late as may be: what it saves may be read behind its loads and writes, unless it says
        otherwise, or loads from the same slot."""
        filled = {(group, slot) for group, _, slot in plan.saves}
        return not (plan.hurried or any((g, slot) in filled for g, slot, _ in plan.loads))

    def launch(self, plan: StepPlan) -> StepResult:
        if not self.saves_late(plan):
            self.save(plan)
        for group, slot, page in plan.loads:
            self.caches[group][page] = [*self.host[group, slot]]
        for init in plan.init:
            self.rows[init.row] = Row(init, init.prompt + init.output)
        writes = [self._slots(w, w.start) for w in plan.works]
        flat = [
            (w.group, *slot) for w, slots in zip(plan.works, writes, strict=True) for slot in slots
        ]
        assert len(set(flat)) == len(flat), "two works write to one slot"
        inputs = [self._inputs(w) for w in plan.works]
        for work, slots, tokens in zip(plan.works, writes, inputs, strict=True):
            for (page, row), token in zip(slots, tokens, strict=True):
                self.caches[work.group][page][row] = token
        if self.saves_late(plan):
            self.save(plan)
        return StepResult(step=plan.step, works=[self._run(w, plan.drafts) for w in plan.works])

    def _slots(self, work: Work, start: int):
        size = self.page_size
        return [(work.pages[i // size], i % size) for i in range(start, work.start + work.length)]

    def _inputs(self, work: Work) -> list[int]:
        if work.tokens is None:
            assert work.sample
            drafts = self.drafts.get(work.row, [])[: work.length - 1]
            assert len(drafts) == work.length - 1, f"{work.rid}: verifies drafts that nobody made"
            return [self.last_tokens[work.row], *drafts]
        assert len(work.tokens) == work.length
        return work.tokens

    def _draft(self, row: Row, count: int) -> list[int]:
        """Tokens behind the row's sequence, some of them right."""
        found = list(row.sequence)
        for _ in range(count):
            right = self.follow(found, row.init.seed, row.init.choice)
            found.append(
                right if zlib.crc32(repr((found, 1)).encode()) % 3 else (right + 1) % VOCAB
            )
        return found[len(row.sequence) :]

    def drawn(self, work: Work, front: list[int], row: Row, masked) -> int:
        """The token behind `front`, which a work's tokens end."""
        return self.follow(front, row.init.seed, row.init.choice, masked)

    def _run(self, work: Work, drafts: int) -> WorkResult:
        row = self.rows[work.row]
        end = work.start + work.length
        seen = [self.caches[work.group][page][i] for page, i in self._slots(work, 0)]
        known = end - work.draws + 1 if work.sample else end
        assert seen[:known] == row.sequence[:known], f"{work.rid}: the cache holds other tokens"
        assert work.sample == (known == len(row.sequence))
        if not work.sample and drafts:
            assert work.next_token == row.sequence[end]
        result = WorkResult(rid=work.rid)
        prompt = row.init.prompt
        if work.prompt_logprobs is not None:
            assert end <= len(prompt)
            targets = prompt[work.start + 1 : end + 1]
            result.prompt_logprobs = [
                TokenLogprob(token, logprob(seen[: work.start + 1 + i], token))
                for i, token in enumerate(targets)
            ]
        if work.sample:
            for ahead in range(work.draws):
                if ahead and seen[known + ahead - 1] != row.sequence[-1]:
                    break
                front = seen[: known + ahead]
                early = len(front) - len(prompt) < row.init.params.min_tokens
                masked = set(row.init.stop_ids) if early else set()
                token = self.drawn(work, front, row, masked)
                result.tokens.append(token)
                if work.logprobs is not None:
                    result.logprobs.append(TokenLogprob(token, logprob(front, token)))
                row.sequence.append(token)
            self.last_tokens[work.row] = row.sequence[-1]
            self.drafts[work.row] = self._draft(row, drafts)
        return result


@dataclass
class Brings:
    """Whoever brings a snapshot from elsewhere."""

    snapshot: int


class Rig:
    """Scheduler and fake device, stepped in lockstep or with `overlap` steps under way."""

    def __init__(
        self,
        num_pages: int = 32,
        page_size: int = 4,
        *,
        prefix: bool = True,
        overlap: int = 0,
        ranks: int = 1,
        snapshots: int | None = None,
        host: int = 0,
        write: str = THROUGH,
        make=FakeDevice,
        **limits,
    ) -> None:
        """snapshots: of what requests keep beside pages; None: they keep nothing. host: slots of
        host memory for pages, and for states, under a write policy. make: the device, of pages,
        their size, rows, ranks and drafts.
        """
        values = {"context_length": 200, "max_running": 8, "eos": (EOS,), **limits}
        values.setdefault("draft_room", max(0, values.get("drafts", 0) - 1))
        self.limits = SchedulerLimits(vocab_size=VOCAB, page_size=page_size, **values)
        self.host, self.write = host, write
        self.ranks = [self._pages(num_pages, page_size, prefix, snapshots) for _ in range(ranks)]
        self.pool, self.prefix = self.ranks[0].pool, self.ranks[0].prefix
        self.scheduler = Scheduler(self.limits, self.ranks)
        self.device = make(num_pages, page_size, self.limits.max_running, ranks)
        self.device.prepare(self)
        self.overlap = overlap
        self.seconds: Callable[[StepPlan], float | None] = lambda plan: None
        self.submits: dict[str, Submit] = {}
        self.answers: dict[str, Answer] = {}
        self.cached: dict[str, int] = {}
        self.launched: list[tuple[StepPlan, StepResult]] = []
        self.plans: list[StepPlan] = []
        self.lent: Callable[[], tuple[list[int], list[int]]] = lambda: ([], [])  # pages, blocks
        self.stalls: Callable[[], bool] = lambda: False  # pages are lent, and never come back

    def _pages(self, count: int, size: int, prefix: bool, snapshots: int | None) -> Pages:
        if not prefix:
            return Pages(PagePool(count), None, size)
        marks = None if snapshots is None else Snapshots(size, self.limits.max_running, snapshots)
        below = None
        if self.host:
            below = HostTier(self.host, self.host, self.write, own_root, marks)
        return Pages(PagePool(count), PrefixCache(size, marks, below), size, marks, below)

    def submit(
        self,
        rid: str,
        prompt: list[int],
        *,
        priority=0,
        choice=0,
        think=None,
        salt="",
        **params,
    ):
        settings = {"max_tokens": 8, "ignore_eos": True, **params}
        submit = Submit(
            rid=rid,
            prompt=prompt,
            params=SamplingParams(**settings),
            seed=len(prompt),
            choice=choice,
            priority=priority,
            think_id=think,
            salt=salt,
        )
        self.scheduler.submit(submit)
        self.submits[rid] = submit
        self.answers[rid] = Answer()

    def abort(self, *rids: str) -> None:
        self.scheduler.abort(rids)
        for rid in rids:
            self.answers.pop(rid, None)
            self.submits.pop(rid, None)

    def step(self) -> StepPlan | None:
        """One step: schedule and launch, then take the result that is due."""
        while self.launched and self.scheduler.awaits_token:
            self.receive()
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_plan(plan)
            for rank, pages in enumerate(self.ranks):
                self.device.poison(rank, pages.pool.free_pages())
            self.launched.append((plan, self.device.launch(plan)))
            self.plans.append(plan)
        else:
            assert self.launched or not self.scheduler.has_work or self.stalls(), "stuck"
        if self.launched and (plan is None or len(self.launched) > self.overlap):
            self.receive()
        self.check_pages()
        return plan

    def receive(self) -> list[Tokens]:
        plan, result = self.launched.pop(0)
        messages = self.scheduler.update(plan, result, self.seconds(plan))
        for message in messages:
            self._take(message)
        return messages

    def run(self, steps: int = 20000) -> None:
        while self.scheduler.has_work:
            steps -= 1
            assert steps, "no end in sight"
            if self.step() is None and not self.launched and self.stalls():
                return

    def _take(self, message: Tokens) -> None:
        answer = self.answers[message.rid]
        assert answer.finish is None, f"{message.rid} goes on after its end"
        answer.tokens += message.tokens
        answer.logprobs += [entry.logprob for entry in message.logprobs or ()]
        if message.prompt_logprobs is not None:
            assert answer.prompt_logprobs is None and len(answer.tokens) == len(message.tokens)
            answer.prompt_logprobs = [
                None if entry is None else entry.logprob for entry in message.prompt_logprobs
            ]
        answer.finish, answer.stop_token = message.finish, message.stop_token
        self.cached[message.rid] = message.cached_tokens

    def check_plan(self, plan: StepPlan) -> None:
        assert 0 < sum(w.length for w in plan.works) <= self.limits.max_step_tokens
        is_prefill = [w.tokens is not None for w in plan.works]
        assert is_prefill == sorted(is_prefill), "decodes come first"
        rows = [w.row for w in plan.works]
        assert len(set(rows)) == len(rows) and len({w.rid for w in plan.works}) == len(rows)
        assert all(w.length <= self.limits.prefill_chunk for w in plan.works)

    def check_pages(self) -> None:
        """Every page of a rank is free, owned by one running request, lent, or cached, exactly
        once."""
        lent, blocks = self.lent()
        for rank, pages in enumerate(self.ranks):
            held = [*pages.pool.free_pages(), *lent]
            cached = pages.prefix.check() if pages.prefix else frozenset()
            held += cached
            here = [r for r in self.scheduler.running if r.group == rank]
            assert pages.num_running == len(here)
            if pages.below is not None:
                pages.below.check()
            if pages.snapshots is not None:
                pages.snapshots.check([*here, *map(Brings, blocks)])
            for request in here:
                assert set(request.pages[: request.num_shared]) <= cached
                held += request.pages[request.num_shared :]
            assert sorted(held) == list(range(pages.pool.num_pages))
        assert all(not r.pages and r.row < 0 for r in self.scheduler.waiting)

    def check_end(self) -> None:
        """Nothing is left behind, and everybody got what it would have got alone."""
        assert not self.scheduler.running and not self.scheduler.waiting
        self.check_pages()
        for pages in self.ranks:
            cached = pages.prefix.num_cached if pages.prefix else 0
            assert pages.pool.num_free + cached == pages.pool.num_pages
            if (made := pages.snapshots) is not None:
                assert made.pool.num_free + made.num_kept == made.pool.num_pages
            assert pages.num_cached == cached
        assert sorted(self.scheduler.holdings.rows) == list(range(self.limits.max_running))
        assert not any(pages._coming for pages in self.ranks)
        pool_tokens = self.pool.num_pages * self.limits.page_size
        for rid, submit in self.submits.items():
            follow = self.device.follow
            expected = alone(submit, self.limits.context_length, pool_tokens, follow=follow)
            assert self.answers[rid] == expected, rid


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens from `start` on, one after the other."""
    return [(start + i) % VOCAB for i in range(length)]


def asked(rig: Rig, rid: str, tokens: Iterable[int], **params) -> int:
    """One request alone, to its end; the tokens of its prompt that the cache had."""
    rig.submit(rid, list(tokens), **params)
    rig.run()
    rig.check_end()
    return rig.cached[rid]
