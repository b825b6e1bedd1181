"""A model with a history of one entry per four tokens and a state, a window of 16 tokens.

It runs over the real scheduler, ledger, prefix cache, snapshots, step inputs and caches, in whole
numbers, so that an answer is right in every bit or wrong. What it computes depends on every token
in front: `plain` says what, without a cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from fake_device import POISON, VOCAB, FakeDevice, Rig, Row
from torch import Tensor

from ds_runtime.engine.step.inputs import StepInputs, read_last_tokens
from ds_runtime.engine.step.plan import StepPlan, StepResult, Work
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.kv.caches import allocate
from ds_runtime.kv.tiers.copies import HostCopies
from ds_runtime.ops.batch import Batch
from ds_runtime.ops.contract import DeviceInfo, Facts
from ds_runtime.ops.contracts.caches import CacheGroup, HistoryGroup, LaidGroup, StateGroup
from ds_runtime.ops.kernel import Layout
from ds_runtime.platform.page_copies import TorchPageCopies

PRIME, LAYERS, WINDOW, RATIO = 2**31 - 1, 2, 16, 4
FAR = HistoryGroup("far", tuple(range(LAYERS)), ratio=RATIO)
NEAR = StateGroup("near", tuple(range(LAYERS)), rows=WINDOW)
CPU = torch.device("cpu")


def allocate_numbers(blocks: int, facts: Facts, device: torch.device) -> Tensor:
    """[blocks, entries] int64, poisoned."""
    return torch.full((blocks, facts.page_size), POISON, dtype=torch.int64, device=device)


NUMBERS = Layout("numbers", 1, f"{__name__}:allocate_numbers", lambda facts: 8)


def _mixed(a, b):
    return (a * 48271 + b * 69621 + 12345) % PRIME


def _near(window) -> int:
    """Of the last tokens, the newest first."""
    return sum(x * (age + 1) for age, x in enumerate(window)) % PRIME


def _entry(four) -> int:
    made = 0
    for x in four:
        made = (made * 7919 + x) % PRIME
    return made


def _far(entries) -> int:
    return sum(e * (j + 1) for j, e in enumerate(entries)) % PRIME


@lru_cache(maxsize=4096)
def plain(tokens: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Per layer, and behind the last, a number for every token: of all, without a cache."""
    if not tokens:
        return ((),) * (LAYERS + 1)
    before, at = plain(tokens[:-1]), len(tokens) - 1
    levels, x = [], _mixed(tokens[-1], at)
    for layer in range(LAYERS + 1):
        levels.append((*before[layer], x))
        own = levels[-1]
        entries = [_entry(own[j : j + RATIO]) for j in range(0, at + 2 - RATIO, RATIO)]
        x = _mixed(_near(own[: -WINDOW - 1 : -1]), _far(entries))
    return tuple(levels)


def chosen(number: int, seed: int, choice: int, forbidden=frozenset()) -> int:
    """The token that a number of the last level stands for."""
    first = _mixed(number, _mixed(seed, choice)) % VOCAB
    return next(t for i in range(VOCAB) if (t := (first + i) % VOCAB) not in forbidden)


def follow(prefix, seed, choice, forbidden=frozenset()) -> int:
    """As `fake_device.next_token`."""
    for end in range(100, len(prefix), 100):
        plain(tuple(prefix[:end]))  # no deep recursion
    return chosen(plain(tuple(prefix))[-1][-1], seed, choice, forbidden)


class ToyDevice(FakeDevice):
    """Keeps the fake device's promises, and draws what the toy computes from its caches."""

    follow = staticmethod(follow)
    groups: tuple[CacheGroup, ...] = (FAR, NEAR)
    loses_copies = False
    undo: int | None = None  # tokens that may be taken back; None: the drafts

    def prepare(self, rig: Rig) -> None:
        self.rig, limits = rig, rig.limits
        self.width, rows = limits.drafts + 1, limits.max_running + 1
        self.last = torch.zeros(rows * self.width, dtype=torch.int64)
        facts = Facts(DeviceInfo("cpu", "a CPU", "x86"), {}, page_size=self.page_size)
        undo = limits.drafts if self.undo is None else self.undo
        laid = [LaidGroup(g, NUMBERS, g.within(facts, undo)) for g in self.groups]
        snapshots = [p.snapshots.pool.num_pages if p.snapshots else 0 for p in rig.ranks]
        self.toys = [allocate(laid, rig.pool.num_pages, rows + n, CPU) for n in snapshots]
        copies = TorchPageCopies(CPU)
        self.below = [HostCopies(toy, rig.host, rig.host, copies) for toy in self.toys]
        pages = -(-limits.context_length // self.page_size) + 1
        self.inputs = StepInputs(
            self.page_size, pages, limits.context_length, self.last, 4096, self.width, stateful=True
        )
        self.numbers: dict[str, list[int]] = {}

    def poison(self, rank, pages) -> None:
        super().poison(rank, pages)
        some = torch.tensor(sorted(pages), dtype=torch.int64)
        for layer in range(LAYERS):
            self.toys[rank].of("far", layer)[some] = POISON

    def launch(self, plan: StepPlan) -> StepResult:
        for rank in range(len(self.toys)):
            below, late = self.below[rank], self.saves_late(plan)
            saves = [(page, slot) for at, page, slot in plan.saves if at == rank]
            loads = [(slot, page) for at, slot, page in plan.loads if at == rank]
            below.begin([] if late else saves, loads, plan.hurried)
            if not self.loses_copies:
                below.move_states([(s, t) for at, s, t in plan.copies if at == rank])
            self._poison_states(rank)
            if works := [w for w in plan.works if w.group == rank]:
                sent = Upload(CPU)
                added = self.inputs.add(works, sent)
                sent.send()
                batch = added.batch(sent, {})
                read_last_tokens(batch, self.last, batch.num_decode)
                self._forward(rank, works, batch)
            below.end()
            below.begin(saves if late else [], [], True)
        result = super().launch(plan)
        for work in plan.works:
            if work.sample:
                told = [self.last_tokens[work.row], *self.drafts[work.row]]
                self.last[work.row * self.width :][: len(told)] = torch.tensor(told)
        return result

    def _poison_states(self, rank: int) -> None:
        """Blocks of rows and snapshots that nobody has."""
        holdings, made = self.rig.scheduler.holdings, self.rig.ranks[rank].snapshots
        free = [*holdings.rows]
        if made is not None:
            free += [self.limits_rows() + page for page in made.pool.free_pages()]
        for layer in range(LAYERS):
            self.toys[rank].of("near", layer)[free] = POISON

    def limits_rows(self) -> int:
        """The first block of a snapshot."""
        return self.rig.limits.max_running + 1

    def _forward(self, rank: int, works: list[Work], batch: Batch) -> None:
        first = 0
        tables = [] if batch.decode is None else list(batch.decode.page_table)
        tables += [] if batch.prefill is None else list(batch.prefill.page_table)
        for work, block, table in zip(works, batch.blocks.tolist(), tables, strict=True):
            assert block == work.row
            rows = slice(first, first + work.length)
            first += work.length
            ids, at, slots = batch.input_ids[rows], batch.positions[rows], batch.slots[rows]
            self.numbers[work.rid] = self._sequence(rank, block, table, ids, at, slots)
        assert first == batch.num_tokens

    def _sequence(self, rank, block, table, ids, at, slots) -> list[int]:
        """A number for each of its tokens, level by level; all caches are written."""
        start, x = int(at[0]), [_mixed(int(i), int(p)) for i, p in zip(ids, at, strict=True)]
        for layer in range(LAYERS + 1):
            if layer == LAYERS:
                return x
            far = self.toys[rank].of("far", layer).view(-1)
            ring = self.toys[rank].of("near", layer)[block]
            old = [int(ring[p % len(ring)]) for p in range(max(0, start - WINDOW + 1), start)]
            every, made = old + x, []
            for i in range(len(x)):
                p, end = start + i, len(old) + i + 1
                if p % RATIO == RATIO - 1:
                    far[int(slots[i]) // RATIO] = _entry(every[end - RATIO : end])
                size = self.page_size
                entries = [
                    int(far[(int(table[j // size]) * size + j % size) // RATIO])
                    for j in range(0, p + 2 - RATIO, RATIO)
                ]
                made.append(
                    _mixed(
                        _near(every[end - WINDOW if end > WINDOW else 0 : end][::-1]), _far(entries)
                    )
                )
            for i in range(max(0, len(x) - len(ring)), len(x)):
                ring[(start + i) % len(ring)] = x[i]
            x = made
        raise AssertionError

    def drawn(self, work: Work, front: list[int], row: Row, masked) -> int:
        number = self.numbers[work.rid][len(front) - 1 - work.start]
        return chosen(number, row.init.seed, row.init.choice, masked)


def toy(
    num_pages: int = 64, page_size: int = 4, *, snapshots: int = 16, make=ToyDevice, **more
) -> Rig:
    """A rig whose device is the toy."""
    return Rig(num_pages, page_size, snapshots=snapshots, make=make, **more)


def with_groups(*groups: CacheGroup) -> type[ToyDevice]:
    """A toy with other groups, to see that it is told apart."""
    return type("Other", (ToyDevice,), {"groups": groups})


def narrower() -> type[ToyDevice]:
    """One whose window is a token too short: each step has its own token beside the window."""
    return with_groups(FAR, replace(NEAR, rows=WINDOW - 2))
