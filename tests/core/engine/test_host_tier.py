"""Pages and states in host memory: answers are those of no cache at all, whatever comes and goes.

The device of these tests saves pages as late as it may, and has real caches for the toy's groups.
"""

from __future__ import annotations

import pytest
import torch
from fake_device import LONG, FakeDevice, Rig, asked
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_scheduler_random import Traffic
from toy_model import CPU, FAR, NUMBERS, ToyDevice, toy

from ds_runtime.kv.caches import allocate
from ds_runtime.kv.tiers.copies import HostCopies
from ds_runtime.kv.tiers.host import BACK, POLICIES, SELECTIVE, THROUGH
from ds_runtime.kv.tiers.slots import TierSlots
from ds_runtime.ops.contract import DeviceInfo, Facts
from ds_runtime.ops.contracts.caches import LaidGroup
from ds_runtime.platform.page_copies import TorchPageCopies
from examples import examples


def crowd(rig, count=20):
    """Others take every page of the device."""
    for _ in range(count):
        at = len(rig.plans)
        asked(rig, f"crowd {at}", [at % 40, at // 40, *range(20, 37)], max_tokens=1)


@pytest.mark.parametrize("make", [FakeDevice, ToyDevice])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_finds_what_the_device_has_no_room_for(make, policy):
    """Where it is saved at all: selectively once a second prompt has read it."""
    snapshots = 4 if make is ToyDevice else None
    rig = Rig(16, 4, snapshots=snapshots, host=200, write=policy, make=make)
    asked(rig, "first", LONG)
    crowd(rig)
    found = asked(rig, "again", LONG)
    assert found == (0 if policy == SELECTIVE else 36)
    assert asked(rig, "third", LONG) == 36
    crowd(rig)
    assert asked(rig, "back", [*LONG, 7, 8]) == 36
    loads = sum(len(p.loads) for p in rig.plans)
    assert loads == (9 if policy == SELECTIVE else 18)
    assert rig.ranks[0].below.num_loaded == loads


def test_part_of_a_path_is_on_the_device():
    """The beginning, which others read, too; the rest comes from the host."""
    rig = toy(16, 4, snapshots=4, host=200)
    asked(rig, "first", LONG)
    for number in range(8):
        asked(rig, f"near {number}", [*LONG[:16], number, 30, 31, 32, 33, 1], max_tokens=1)
    here = len(rig.prefix.find([*LONG, 0]).pages)
    assert 0 < here < 9
    assert asked(rig, "again", LONG) == 36
    assert sum(len(p.loads) for p in rig.plans[-9:]) == 9 - here


def test_nothing_is_noted_without_a_tier():
    rig = toy(16, 4, snapshots=4)
    asked(rig, "first", LONG)
    crowd(rig)
    assert asked(rig, "again", LONG) == 0
    assert not any(p.saves or p.loads for p in rig.plans)


def test_a_flush_forgets_the_host_too_and_what_runs_leaves_nothing_there():
    rig = toy(16, 4, snapshots=4, host=200)
    asked(rig, "first", LONG)
    rig.submit("runs", [*LONG, 5, 6, 7, 8], max_tokens=12)
    for _ in range(3):
        rig.step()
    rig.scheduler.flush()
    rig.run()
    rig.check_end()
    crowd(rig)
    assert asked(rig, "again", LONG) == 0


def test_a_tenant_finds_nothing_of_another():
    rig = toy(16, 4, snapshots=4, host=200)
    asked(rig, "a", LONG, salt="a")
    crowd(rig)
    assert asked(rig, "b", LONG, salt="b") == 0
    crowd(rig)
    assert asked(rig, "again", LONG, salt="a") == 36


@pytest.mark.parametrize("policy", POLICIES)
def test_what_broke_leaves_the_host(policy):
    """What it computed, what others computed behind that, and every state on its way."""
    rig = toy(32, 4, snapshots=8, host=200, write=policy)
    asked(rig, "a", LONG[:17])
    rig.submit("b", LONG, max_tokens=20)
    while len(rig.answers["b"].tokens) < 8:
        rig.step()
    asked_behind = [*LONG, *rig.answers["b"].tokens[:5]]
    rig.submit("c", asked_behind, max_tokens=20)
    while len(rig.answers["c"].tokens) < 4:
        rig.step()
    request = next(r for r in rig.scheduler.running if r.rid == "b")
    rig.scheduler._break(request, 45)
    rig.run()
    del rig.answers["b"], rig.submits["b"]
    below = rig.ranks[0].below
    below.check()
    known = rig.prefix.match([*asked_behind, 1, 2], everywhere=True)
    assert known.num_pages == 0, "a's pages stay, but nothing goes on from them"
    assert len(rig.prefix.find([*asked_behind, 1, 2]).pages) == 4
    crowd(rig)
    assert len(below.behind(rig.prefix.find([]), [*asked_behind, 1, 2], 4).behind) <= 4


@pytest.mark.parametrize("host", [3, 24, 300])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("make", "snapshots", "overlap", "drafts", "ranks"),
    [(FakeDevice, None, 0, 0, 1), (FakeDevice, None, 2, 3, 2), (ToyDevice, 5, 1, 3, 1)],
)
def test_random_traffic_is_exact(make, snapshots, overlap, drafts, ranks, policy, host):
    rig = Rig(
        14,
        4,
        snapshots=snapshots,
        host=host,
        write=policy,
        overlap=overlap,
        drafts=drafts,
        ranks=ranks,
        max_running=6,
        max_step_tokens=24,
        prefill_chunk=8,
        context_length=70,
        queue_limit=20,
        make=make,
    )
    traffic = Traffic(rig, seed=host)
    below = rig.ranks[0].below
    while traffic.num_submitted < 150 or not below.num_loaded:  # selectively they are rare
        assert traffic.num_submitted < 3000, "nothing comes back from the host"
        traffic.act()
        rig.step()
    rig.run()
    rig.check_end()
    rig.scheduler.flush()
    assert rig.scheduler.holdings.num_free == 14 * ranks
    assert len(below.pages) == 0


class Unhurried(FakeDevice):
    """Saves behind the writes of a step that says it may write to what it saves."""

    @staticmethod
    def saves_late(plan):
        return not plan.loads


class Lossy(FakeDevice):
    """Loads nothing."""

    def launch(self, plan):
        plan.loads.clear()
        return super().launch(plan)


@pytest.mark.parametrize(("make", "policy"), [(Unhurried, BACK), (Lossy, THROUGH)])
def test_a_fault_shows(make, policy):
    rig = Rig(12, 4, host=200, write=policy, make=make)
    with pytest.raises(AssertionError):
        for turn in range(3):
            for number in range(8):
                prompt = [number, *LONG[:16]]
                rig.submit(f"{turn} {number}", prompt, max_tokens=9)
            rig.run()
            rig.check_end()


@given(
    sessions=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=2, max_size=12),
    pages=st.integers(12, 30),
    host=st.integers(1, 60),
    policy=st.sampled_from(POLICIES),
    overlap=st.integers(0, 2),
)
@settings(max_examples=examples(30), deadline=None)
def test_sessions_go_on_exactly(sessions, pages, host, policy, overlap):
    """Turn after turn, each behind the answer to the last."""
    rig = toy(pages, 4, snapshots=4, host=host, write=policy, overlap=overlap, max_running=3)
    said: dict[int, list[int]] = {}
    for turn, (session, more) in enumerate(sessions):
        prompt = [*said.get(session, [session])[:24], *[turn % 7] * min(more, 9)]
        asked(rig, str(turn), prompt, max_tokens=4)
        said[session] = prompt + rig.answers[str(turn)].tokens


class Noting(TorchPageCopies):
    """Which way copies went."""

    def __init__(self, device):
        super().__init__(device)
        self.ways = list[str]()

    def save(self, layers):
        self.ways.append("save")
        return super().save(layers)

    def load(self, layers):
        self.ways.append("load")
        return super().load(layers)


PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6)


@given(
    saves=PAIRS.map(lambda pairs: [*{slot: (page, slot) for page, slot in pairs}.values()]),
    loads=PAIRS.map(lambda pairs: [*{page: (slot, page) for slot, page in pairs}.values()]),
    hurried=st.booleans(),
)
@settings(max_examples=examples(150), deadline=None)
def test_loads_go_first_where_that_changes_nothing(saves, loads, hurried):
    """Pages and slots are those of saves that all ran in front of all loads."""
    copies = Noting(CPU)
    facts = Facts(DeviceInfo("cpu", "a CPU", "x86"), {}, page_size=4)
    caches = allocate([LaidGroup(FAR, NUMBERS, FAR.within(facts, 0))], 6, 2, CPU)
    below = HostCopies(caches, 6, 0, copies)
    pages, slots = [10 + n for n in range(6)], [50 + n for n in range(6)]
    hosts = [one.host.view(torch.int64) for one in below._pages]
    for layer, host in enumerate(hosts):
        for number in range(6):
            caches.of("far", layer)[number] = pages[number] + 100 * layer
            host[number] = slots[number] + 100 * layer
    below.begin(saves, loads, hurried)
    below.end()
    for page, slot in saves:
        slots[slot] = pages[page]
    for slot, page in loads:
        pages[page] = slots[slot]
    for layer, host in enumerate(hosts):
        assert caches.of("far", layer)[:6, 0].tolist() == [n + 100 * layer for n in pages]
        assert host[:, 0].tolist() == [n + 100 * layer for n in slots]
    filled, read = {slot for _, slot in saves}, {page for page, _ in saves}
    apart = all(slot not in filled and page not in read for slot, page in loads)
    if saves and loads:
        assert copies.ways == (["load", "save"] if apart and not hurried else ["save", "load"])


class SlotsMachine(RuleBasedStateMachine):
    """Against a list of names, those used last at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.order, self.pinned = TierSlots(4), [], set()
        self.where: dict[bytes, int] = {}

    @rule(number=st.integers(0, 9))
    def use(self, number):
        name = bytes([number])
        assert self.slots.touch(name) == (name in self.order)
        if name in self.order:
            self.order.remove(name)
            self.order.append(name)
            return
        busy = {self.where[n] for n in self.order} | self.pinned
        slot = self.slots.take(name)
        if len(busy) == 4:
            gone = next((n for n in self.order if self.where[n] not in self.pinned), None)
            if gone is None:
                assert slot == -1
                return
            self.order.remove(gone)
            assert slot == self.where.pop(gone)
        else:
            assert slot not in busy
        self.order.append(name)
        self.where[name] = slot
        self.pinned.add(slot)

    @rule(number=st.integers(0, 9))
    def drop(self, number):
        name = bytes([number])
        self.slots.drop(name)
        if name in self.order:
            self.order.remove(name)

    @rule()
    def release(self):
        self.slots.release()
        self.pinned.clear()

    @invariant()
    def same(self):
        self.slots.check()
        assert self.slots.names() == self.order
        for name in self.order:
            assert self.slots._names[name] == self.where[name]


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=examples(100), deadline=None)
