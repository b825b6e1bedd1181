"""Thousands of random requests through the scheduler, with every promise checked every step."""

from __future__ import annotations

import random

import pytest
from fake_device import VOCAB, Rig

from ds_runtime.errors import QueueFullError

SETTINGS = [
    # pages, page size, max_running, max_step_tokens, prefill_chunk, policy, prefix, overlap,
    # in steps, drafts where there are any, and ranks that have sequences of their own
    (64, 4, 8, 64, 16, "fifo", True, False),
    (64, 4, 8, 64, 16, "priority", True, True),
    (14, 4, 6, 24, 8, "fifo", True, False),
    (14, 4, 6, 24, 8, "fifo", True, True),
    (13, 4, 6, 5, 3, "priority", True, False),
    (13, 4, 6, 5, 3, "priority", True, True),
    (40, 1, 5, 30, 30, "fifo", True, True),
    (30, 2, 12, 4, 7, "fifo", True, False),
    (14, 4, 6, 24, 8, "fifo", False, False),
    (14, 4, 6, 24, 8, "priority", False, True),
    (200, 8, 32, 128, 32, "fifo", True, True),
    (3, 16, 4, 16, 16, "fifo", True, True),
    (14, 4, 6, 24, 8, "fifo", True, 2),
    (14, 4, 6, 24, 8, "priority", True, 3),
    (64, 4, 8, 64, 16, "fifo", True, False, 3),
    (14, 4, 6, 24, 8, "priority", True, True, 2),
    (30, 2, 12, 7, 7, "fifo", False, 2, 4),
    (64, 4, 8, 64, 16, "fifo", True, False, 0, 2),
    (14, 4, 14, 24, 8, "fifo", True, True, 0, 3),
    (14, 4, 20, 40, 8, "priority", False, 2, 0, 4),
]


class Traffic:
    """Random requests with shared beginnings, choices, priorities, aborts and flushes."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.num_submitted = 0
        longest = min(50, rig.limits.context_length - 1, rig.pool.num_pages * rig.limits.page_size)
        self.longest = longest
        self.stems = [self._tokens(longest) for _ in range(4)]

    def _tokens(self, length: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(length)]

    def prompt(self) -> list[int]:
        r = self.random
        length = r.randint(1, r.choice([6, self.longest]))
        stem = r.choice(self.stems)[: r.randint(0, length)]
        told = [s.prompt + self.rig.answers[rid].tokens for rid, s in self.rig.submits.items()]
        if told and r.random() < 0.2:  # the next turn of an earlier request
            stem = r.choice(told)[:length]
        return stem + self._tokens(length - len(stem))

    def params(self) -> dict:
        r = self.random
        max_tokens = r.choice([1, 2, r.randint(1, 60), None])
        return {
            "max_tokens": max_tokens,
            "min_tokens": r.choice([0, 0, r.randint(0, max_tokens or 20)]),
            "ignore_eos": r.random() < 0.5,
            "stop_token_ids": tuple(r.sample(range(VOCAB), r.choice([0, 0, 2]))),
            "logprobs": r.choice([None, None, 0, 3]),
            "prompt_logprobs": r.choice([None, None, None, None, 2]),
        }

    def submit(self) -> None:
        r, count = self.random, self.random.choice([1, 1, 1, 2, 5])
        prompt, params = self.prompt(), self.params()
        priority = r.randint(-2, 2)
        params["salt"] = r.choice(["", "", "", "a", "b"])
        for choice in range(count):
            rid = f"r{self.num_submitted}"
            try:
                self.rig.submit(rid, prompt, choice=choice, priority=priority, **params)
            except QueueFullError:
                return
            self.num_submitted += 1

    def act(self) -> None:
        """What happens between two steps."""
        r = self.random
        for _ in range(r.choice([0, 0, 0, 1, 2])):
            self.submit()
        running = [rid for rid, a in self.rig.answers.items() if a.finish is None]
        if running and r.random() < 0.03:
            self.rig.abort(*r.sample(running, min(len(running), r.randint(1, 3))))
        if r.random() < 0.02:
            held = self.rig.scheduler.holdings
            before = held.num_free
            assert self.rig.scheduler.flush() == held.num_free - before


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s)))
def test_random_traffic(setting):
    pages, page_size, max_running, step_tokens, chunk, policy, prefix, overlap, *more = setting
    drafts, ranks = more if len(more) == 2 else (sum(more), 1)
    rig = Rig(
        pages,
        page_size,
        prefix=prefix,
        overlap=overlap,
        max_running=max_running,
        max_step_tokens=step_tokens,
        prefill_chunk=chunk,
        policy=policy,
        context_length=90,
        queue_limit=30,
        drafts=drafts,
        ranks=ranks,
    )
    traffic = Traffic(rig, seed=SETTINGS.index(setting))
    while traffic.num_submitted < 500:
        traffic.act()
        rig.step()
    rig.run()
    rig.check_end()
    stats = rig.scheduler.stats()
    assert (stats.cached_tokens > 0) == prefix
    assert (stats.accepted_tokens > 0) == bool(drafts)
    assert stats.accepted_tokens <= stats.draft_tokens
    if pages * page_size < 60:
        assert stats.preemptions > 0
    rig.scheduler.flush()
    assert rig.scheduler.holdings.num_free == pages * ranks
    assert {w.group for p in rig.plans for w in p.works} == set(range(ranks))
