"""Files of several ranks: a slot is done with once all have answered, in whatever order they do."""

from __future__ import annotations

import gc
import io
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from itertools import chain

import msgspec
import pytest
from fake_device import LONG, asked
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace
from test_disk_tier import HostBytes, Remembered, data
from toy_model import ToyDevice, toy

from ds_runtime.engine.step.plan import StepPlan
from ds_runtime.errors import EngineDeadError
from ds_runtime.kv.tiers.disk import Disk
from ds_runtime.kv.tiers.disks import Disks
from ds_runtime.kv.tiers.folder import DiskFolder
from ds_runtime.kv.tiers.hand import LOST, DiskHand, EndedFutures
from ds_runtime.kv.tiers.host import BACK, POLICIES
from ds_runtime.kv.tiers.linked import DiskDone, DiskFollower, DiskJob, DiskLink, LinkedHands
from ds_runtime.kv.tiers.slots import TierSlots
from ds_runtime.parallel.link.leader import Leader
from ds_runtime.parallel.link.member import Member
from ds_runtime.parallel.link.messages import Hello
from examples import examples


class ByHand:
    """Hands that finish when the test says so."""

    stopped = ""

    def __init__(self):
        self.open = list[Future]()
        self.forgotten = list[bytes]()

    def write(self, kind, slot, name):
        self.open.append(Future())
        return self.open[-1]

    read = write

    def forget(self, name, kinds):
        self.forgotten.append(name)

    def poll(self, finish=False):
        pass


class LinkMachine(RuleBasedStateMachine):
    """Rank 0, two others of its group, and one of another group."""

    def __init__(self) -> None:
        super().__init__()
        self.hands = [ByHand() for _ in range(4)]
        self.ways = [[], [], []]  # messages on their way to the other ranks
        self.said = list[bytes]()
        self.link = DiskLink(self.send, self.told)
        self.linked = LinkedHands(self.link, 0, self.hands[0], 2)
        groups = (0, 0, 1)
        ends = zip(self.hands[1:], groups, strict=True)
        self.followers = [DiskFollower(hand, group) for hand, group in ends]
        self.asked = list[tuple[Future, dict]]()  # what was asked, and results by rank
        self.where = dict[int, tuple[int, int]]()  # id of an open future → job, rank
        self.names = list[bytes]()

    def send(self, job):
        for way in self.ways:
            way.append(job)

    def told(self, milliseconds):
        found, self.said = self.said, []
        return found

    def note(self, rank, job):
        self.where[id(self.hands[rank].open[-1])] = job, rank

    @rule(way=st.sampled_from(["read", "write"]), number=st.integers(0, 5))
    def ask(self, way, number):
        future = getattr(self.linked, way)("page", number, bytes([number]))
        self.asked.append((future, {}))
        self.note(0, len(self.asked) - 1)

    @rule(number=st.integers(0, 5))
    def forget(self, number):
        self.linked.forget(bytes([number]), ["page"])
        self.names.append(bytes([number]))

    @rule(rank=st.integers(1, 3))
    def deliver(self, rank):
        if not self.ways[rank - 1]:
            return
        job, hand = self.ways[rank - 1].pop(0), self.hands[rank]
        before = len(hand.open)
        self.followers[rank - 1].take(job)
        if rank == 3:
            assert len(hand.open) == before and not hand.forgotten, "it is another group's"
        elif job.way != "forget":
            self.note(rank, job.number - 1)

    @rule(rank=st.integers(0, 2), which=st.integers(0, 9), nbytes=st.sampled_from([LOST, 0, 7]))
    def finish(self, rank, which, nbytes):
        left = [one for one in self.hands[rank].open if not one.done()]
        if left:
            one = left[which % len(left)]
            job, _ = self.where[id(one)]
            self.asked[job][1][rank] = nbytes
            one.set_result(nbytes)

    @rule()
    def answer(self):
        for follower in self.followers:
            self.said += follower.answers()
        self.linked.poll()

    @invariant()
    def none_is_done_before_all_are(self):
        for future, results in self.asked:
            if future.done():
                assert len(results) == 3
                lost = LOST in results.values()
                assert future.result() == (LOST if lost else sum(results.values()))

    @precondition(lambda self: self.asked)
    @rule()
    def all_end(self):
        for rank in (1, 2, 3):
            while self.ways[rank - 1]:
                self.deliver(rank)
        for rank in range(3):
            while not all(one.done() for one in self.hands[rank].open):
                self.finish(rank, 0, 7)
        self.answer()
        assert all(future.done() for future, _ in self.asked)
        assert not any(follower.busy for follower in self.followers)
        assert [hand.forgotten for hand in self.hands] == [self.names] * 3 + [[]]


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=4))
@settings(max_examples=examples(20), deadline=None)
def test_each_end_is_taken_once_whichever_thread_it_ends_in(counts):
    ended, futures = EndedFutures(), [[Future() for _ in range(count)] for count in counts]
    for future in chain.from_iterable(futures):
        ended.watch(future)
    threads = [
        threading.Thread(target=lambda some: [one.set_result(1) for one in some], args=(some,))
        for some in futures
    ]
    for thread in threads:
        thread.start()
    found = list[Future]()
    while len(found) < sum(counts):
        assert ended.wait(20), "one ended that nobody hears of"
        found += ended.take()
    for thread in threads:
        thread.join()
    assert {id(one) for one in found} == {id(one) for one in chain.from_iterable(futures)}
    assert len(found) == sum(counts) and not ended.take()


@pytest.mark.parametrize("who", ["disk", "follower"])
def test_what_waits_costs_the_same_however_many_files_are_read(tmp_path, who):
    """Python's calls per file: a step that asks every file for its end is too busy to read."""

    def calls(count):
        hand, slots, made = ByHand(), TierSlots(count), 0
        disk = Disk(DiskFolder(tmp_path / "cache", 10**6), hand)
        follower = DiskFollower(hand, 0)
        for number in range(count):
            name, job = number.to_bytes(32, "big"), {"group": 0, "way": "read", "kinds": ["page"]}
            if who == "follower":
                follower.take(DiskJob(number=number, name=name, **job))
        if who == "disk":
            names = [number.to_bytes(32, "big") for number in range(count)]
            wanted = [(slots, "page", name, partial(slots.adopt, name)) for name in names]
            fetch = disk.fetch([], lambda _: wanted)
            while fetch.left < count:
                disk.poll(seconds=1)

        def count_it(frame, event, arg):
            nonlocal made
            made += event in ("call", "c_call")

        gc.disable()  # a collection calls what other tests' packages have hung on it
        sys.setprofile(count_it)
        for one in hand.open:
            one.set_result(7)
            disk.poll() if who == "disk" else follower.answers()
        sys.setprofile(None)
        gc.enable()
        assert not disk.lags and not follower.busy
        return made / count

    assert calls(400) < 1.5 * calls(100)


TestLink = LinkMachine.TestCase
TestLink.settings = settings(max_examples=examples(60), deadline=None)


def test_an_error_of_a_rank_s_own_comes_out():
    """It is no answer that is waited for to the end."""
    link, own = DiskLink(lambda job: None, lambda _: []), ByHand()
    asked_for = LinkedHands(link, 0, own, 1).write("page", 0, b"a")
    own.open[0].set_exception(MemoryError("there is none"))
    with pytest.raises(MemoryError):
        asked_for.result(0)


@pytest.mark.parametrize("waits", ["drain", "go_on", "close"])
def test_who_waits_for_the_file_of_a_rank_that_died_learns_it(tmp_path, waits):
    """Over the real link of one machine: the wait ends in seconds, with why."""
    address, own = f"ipc://{tmp_path}/link", Hello(0, 2, "{}")
    leader, member = Leader(address, own, lambda here, there: []), Member(address)
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(member.greet, replace(own, rank=1), 20)
        leader.wait("there", 20, lambda: None)
        assert met.result() == "there"
    files = DiskFolder(tmp_path / "cache", 10**6)
    hands = LinkedHands(DiskLink(leader.send, leader.told), 0, DiskHand(files, HostBytes(8)), 1)
    disk, slots = Disk(files, hands), TierSlots(8)
    slots.adopt(bytes(32), slots.reserve())
    disk.save(slots, "page", 0, bytes(32))
    disk.poll(idle=True)
    assert disk.lags and member.receive(5000) is not None, "it has been told, and never answers"
    member.close()
    raised = list[BaseException]()

    def wait():
        try:
            while disk.lags:
                getattr(disk, waits)(*([0.1] if waits == "go_on" else []))
        except EngineDeadError as e:
            raised.append(e)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(8)
    assert not waiting.is_alive() and "rank 1 has left" in str(raised[0])
    leader.part()
    hands.close()


@given(
    saved=st.lists(st.integers(0, 10), min_size=1, max_size=4), answers=st.sets(st.integers(1, 9))
)
@settings(max_examples=examples(25), deadline=None)
def test_closing_counts_what_no_group_has_written(tmp_path_factory, saved, answers):
    """Ranks of other machines answer some writes, and the rest never."""
    folder = DiskFolder(tmp_path_factory.mktemp("d") / "cache", 10**6)
    jobs, said = list[int](), list[bytes]()

    def send(job):
        jobs.append(job.number)
        if job.number in answers:
            said.append(msgspec.msgpack.encode(DiskDone(number=job.number, nbytes=7)))

    def told(milliseconds):
        found = said.copy()
        said.clear()
        return found

    link = DiskLink(send, told)
    every = [Disk(folder, LinkedHands(link, group, None, 1)) for group in range(len(saved))]
    for disk, count in zip(every, saved, strict=True):
        slots = TierSlots(40)
        for number in range(count):
            disk.save(slots, "page", slots.take(bytes([number])), bytes([number]))
    disks, text = Disks(every), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(text):
        patch.setattr("ds_runtime.kv.tiers.disks.PATIENCE", 0.05)
        disks.close(settle=lambda: False, unsettled=lambda: 0)
    written = len(answers & {*jobs})
    assert disks.bytes_written == 7 * written
    left = sum(saved) - written
    assert text.getvalue().count("warning") == (left > 0)
    assert f": {left} pages were not written" in text.getvalue() or not left


def engine(folder, known, policy, pages, host):
    """Two groups of one rank each, over the toy, and a link without sockets."""
    rig = toy(pages, 4, snapshots=4, host=host, write=policy, make=ToyDevice, ranks=2)
    rig.device.host = Remembered(rig, known)
    files = [DiskFolder(folder, 10**8) for _ in range(2)]
    hands = [DiskHand(*pair) for pair in zip(files, rig.device.below, strict=True)]
    other = DiskFollower(hands[1], 1)
    link = DiskLink(other.take, lambda _: other.answers())
    ends = [LinkedHands(link, 0, hands[0], 0), LinkedHands(link, 1, None, 1)]
    disks = Disks([Disk(files[0], end) for end in ends])
    for pages_of, disk in zip(rig.ranks, disks._every, strict=True):
        pages_of.below.disk = disk
    schedule = rig.scheduler.schedule

    def scheduled():
        disks.poll(idle=True)
        plan = schedule()
        while plan is None and any(one.busy for one in disks._every):
            disks.poll(idle=True, seconds=0.1)
            plan = schedule()
        return plan

    rig.scheduler.schedule = scheduled
    return rig, disks, other


def settle(rig, disks):
    """As an engine does that has nothing to do."""
    disks.drain()
    while sum(pages.below.settle() for pages in rig.ranks):
        plan = StepPlan(step=0, works=[])
        rig.scheduler.holdings.drain(plan)
        rig.device.launch(plan)
        disks.drain()


def close(disks, other):
    disks.close(settle=lambda: False, unsettled=lambda: 0)
    other.close()


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=2, max_size=9),
    restarts=st.sets(st.integers(1, 8), max_size=3),
    torn=st.integers(0, 3),
    policy=st.sampled_from(POLICIES),
    pages=st.integers(14, 24),
    host=st.integers(4, 60),
    settles=st.booleans(),
)
@settings(max_examples=examples(15), deadline=None)
def test_sessions_of_two_groups_go_on_exactly_over_restarts(
    tmp_path_factory, prompts, restarts, torn, policy, pages, host, settles
):
    folder, known = tmp_path_factory.mktemp("d") / "cache", {}
    make = partial(engine, folder, known, policy, pages, host)
    rig, disks, other = make()
    for turn, (session, length) in enumerate(prompts):
        if turn in restarts:
            if settles:
                settle(rig, disks)
            close(disks, other)
            for path in sorted(data(folder))[:torn]:
                path.write_bytes(path.read_bytes()[:-3])
            rig, disks, other = make()
        rig.submit(f"{turn} beside", [session, 1, *LONG][:length], max_tokens=2)
        asked(rig, str(turn), [session, *LONG][:length], max_tokens=6)
        for group in rig.ranks:
            group.below.check()
    close(disks, other)
    for group in rig.ranks:
        group.below.check()


def test_at_rest_the_disk_has_all_that_is_proved(tmp_path):
    """By write_back, pages and states of both groups; a second rest has nothing to do."""
    rig, disks, other = engine(tmp_path / "cache", {}, BACK, 60, 200)
    for number in range(6):
        rig.submit(f"{number} beside", [number, 9, *LONG], max_tokens=3)
        asked(rig, str(number), [number, *LONG], max_tokens=3)
    before = [path for path in data(tmp_path / "cache") if path.suffix == ".page"]
    assert not before, "all of them fit on the device"
    settle(rig, disks)
    files, count = disks._every[0].folder, 0
    for group in rig.ranks:
        for node in group.prefix._nodes.values():
            assert node.is_proved and files.has(node.name, "page")
            assert node not in group.snapshots or files.has(node.name, "state")
            count += 1
    assert count >= 100
    assert all(group.prefix._nodes for group in rig.ranks)
    assert sum(group.below.settle() for group in rig.ranks) == 0
    close(disks, other)
