"""Which rank comes last: from what ranks tell, over the link, and from what they measure."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.engine.device import waits as waits_module
from ds_runtime.engine.device.waits import EVERY, Waits
from ds_runtime.parallel.link.leader import Leader
from ds_runtime.parallel.link.member import Member
from ds_runtime.parallel.link.messages import Hello, Waited
from ds_runtime.parallel.skew import Skew

whole = st.integers(0, 1000).map(float)  # sums of which are exact
steps_of_ranks = st.integers(2, 5).flatmap(
    lambda ranks: st.lists(st.lists(whole, min_size=ranks, max_size=ranks), min_size=1, max_size=9)
)


@given(steps_of_ranks, st.randoms())
def test_ranks_may_tell_in_any_order(waited, random):
    """Arrivals: whoever waited w came at some T - w."""
    told = [(rank, step, w) for step, some in enumerate(waited) for rank, w in enumerate(some)]
    random.shuffle(told)
    skew = Skew(len(waited[0]))
    for one in told:
        skew.note(*one)
    arrivals = [[5000.0 - w for w in some] for some in waited]
    assert skew.steps == len(waited)
    assert skew.seconds == sum(max(some) - min(some) for some in arrivals)
    for rank, late in skew.late.items():
        assert late == sum(some[rank] - min(some) for some in arrivals)


def test_steps_that_a_rank_never_tells_of_are_forgotten():
    skew = Skew(2)
    for step in range(0, 1000 * EVERY, EVERY):
        skew.note(0, step, 1.0)
    assert skew.steps == 0 and len(skew._pending) < 100
    skew.note(1, 999 * EVERY, 0.25)
    assert (skew.steps, skew.seconds, skew.late) == (1, 0.75, {0: 0.0, 1: 0.75})


def test_ranks_tell_rank_0(tmp_path):
    address = f"ipc://{tmp_path}/r"
    own = Hello(0, 3, "{}")
    leader = Leader(address, own, lambda here, there: [])
    members = [Member(address) for _ in range(2)]
    for rank, member in enumerate(members, 1):
        member._end.say(hello(rank))
    leader.wait("file:///there", 20, lambda: None)
    for rank, member in enumerate(members, 1):
        member.waited(Waited(32, rank / 2))
        member.tell(b"of a disk")
    found, deadline = [], time.monotonic() + 20
    while len(found) < 2 and time.monotonic() < deadline:
        found += leader.waited()
    assert sorted(found) == [(1, Waited(32, 0.5)), (2, Waited(32, 1.0))]
    told = []
    while len(told) < 2 and time.monotonic() < deadline:
        told += leader.told(10)
    assert told == [b"of a disk"] * 2
    assert leader.waited() == []
    leader.leave()
    leader.close()
    for member in members:
        member.close()


def hello(rank):
    return msgspec.msgpack.encode(Hello(rank, 3, "{}"))


CPU = torch.device("cpu")


def test_what_the_host_spends_in_collectives_counts():
    comm = SimpleNamespace(size=2, waited=SimpleNamespace(seconds=1.0))
    waits = Waits(comm, False, CPU)
    for step in range(-2, 2 * EVERY):
        waits.begin(step)
        comm.waited.seconds += 0.5
        waits.end()
    assert waits.take() == [Waited(0, 0.5), Waited(EVERY, 0.5)] and waits.take() == []


@pytest.mark.parametrize(
    "comm",
    [
        SimpleNamespace(size=1, waited=SimpleNamespace(seconds=0.0)),
        SimpleNamespace(size=2),  # of a platform whose communicator does not count
    ],
)
def test_where_nothing_can_be_measured_nothing_is(comm):
    waits = Waits(comm, False, CPU)
    waits.begin(0)
    waits.end()
    assert waits.take() == []


class Event:
    """One of a device that reaches it when told."""

    clock = 0.0
    reached = False

    def __init__(self, device, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.clock

    def query(self):
        return Event.reached

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_device_is_asked_later_and_never_waited_for(monkeypatch):
    monkeypatch.setattr(waits_module.torch, "Event", Event)
    waits = Waits(SimpleNamespace(size=2), True, CPU)
    for step in range(20 * EVERY):
        Event.clock = 100.0 * step
        waits.begin(step)
        Event.clock += step / EVERY
        waits.end()
        assert waits.take() == []
    monkeypatch.setattr(Event, "reached", True)
    found = waits.take()
    assert [one.step // EVERY for one in found] == [16, 17, 18, 19]  # the last ones are kept
    assert [one.seconds for one in found] == [0.016, 0.017, 0.018, 0.019]


def test_a_device_whose_events_have_no_times_measures_nothing():
    waits = Waits(SimpleNamespace(size=2), True, torch.device("meta"))
    for step in range(3 * EVERY):
        waits.begin(step)
        waits.end()
    assert waits.take() == []


@pytest.mark.parametrize("fails", ["query", "elapsed_time"])
def test_a_device_whose_events_can_only_be_recorded_measures_nothing(monkeypatch, fails):
    """As torch's device guards do that leave `elapsedTime` out."""

    def lacks(*_):
        raise NotImplementedError("Backend doesn't support elapsedTime.")

    monkeypatch.setattr(waits_module.torch, "Event", Event)
    monkeypatch.setattr(Event, "reached", True)
    monkeypatch.setattr(Event, fails, lacks)
    waits = Waits(SimpleNamespace(size=2), True, CPU)
    for step in range(3 * EVERY):
        waits.begin(step)
        waits.end()
        assert waits.take() == []
    monkeypatch.setattr(waits_module.torch, "Event", lacks)
    waits.begin(3 * EVERY)  # no further event is asked for
