"""Why ranks of several nodes end: the first cause reaches all of them, whoever says it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_link import OWN, SHARE, SOON, Word, differ, free_port, lives, others

from ds_runtime.common.patience import WHOLE
from ds_runtime.errors import ConfigError, EngineDeadError
from ds_runtime.parallel.link.leader import Leader
from ds_runtime.parallel.link.member import Member
from ds_runtime.parallel.link.messages import Cause, Hello, Witness, first_of, instead, report
from examples import examples

MATES = [msgspec.structs.replace(OWN, rank=rank) for rank in (1, 2)]


ALL = SHARE * WHOLE  # until all know
TOLD_ONLY = replace(SOON, silence=90.0)
"""Nobody is missed for his silence: what is known sooner was told, or a connection broke."""


class Told:
    """What `lost` was given."""

    def __init__(self):
        self.why, self.event = None, threading.Event()

    def __call__(self, why):
        self.why = why
        self.event.set()


def leading(address, limits=SOON, size=3):
    """The end of rank 0, on a node of its own."""
    return Leader(address, msgspec.structs.replace(OWN, size=size), differ, 1, limits=limits)


def joining(address, limits=SOON):
    """The end of another rank."""
    return Member(address, limits=limits)


@contextmanager
def three(watched=True, limits=SOON):
    """Rank 0, and two others on nodes of their own: ends, and what each is told."""
    address = f"tcp://127.0.0.1:{free_port()}"
    leader, ends = leading(address, limits), [joining(address, limits) for _ in MATES]
    met = threading.Thread(target=leader.wait, args=("there", 20, lives))
    met.start()
    greeted = [
        threading.Thread(target=end.greet, args=(mate, 20))
        for end, mate in zip(ends, MATES, strict=True)
    ]
    for thread in greeted:
        thread.start()
    for thread in (*greeted, met):
        thread.join()
    told = [Told() for _ in range(3)]
    for end, one in zip((leader, *ends), told, strict=True) if watched else ():
        end.watch(one)
    yield address, leader, ends, told
    leader.leave()
    for end in ends:  # while there is somebody to take their last words, for which they wait
        end.close()
    leader.close()


def test_a_rank_that_fails_tells_all():
    with three(limits=TOLD_ONLY) as (_, _, ends, told):
        begin = time.monotonic()
        assert ends[1].fail(2, "engine rank 2 failed: x") == "engine rank 2 failed: x (on node 2)"
        for one in told[:2]:
            assert one.event.wait(ALL) and one.why == "engine rank 2 failed: x (on node 2)"
        assert time.monotonic() - begin < ALL


def test_one_that_was_killed_is_told_of_by_another_and_is_first():
    """Others fail before that is known, since their connections to it broke."""
    with three() as (address, leader, ends, told):
        failed = threading.Thread(target=leader.fail, args=("rank 0 failed: closed by peer",))
        failed.start()
        ends[1].close()
        report(address, None, Cause(Witness.SEEN, 2, "engine rank 2 was ended by SIGKILL"), SOON)
        said = "engine rank 2 was ended by SIGKILL (on node 2)"
        assert ends[0].fail(1, "rank 1 failed: closed by peer") == said
        failed.join()
        assert told[0].why == said


def test_rank_0_that_fails_tells_all_and_goes_on_with_its_own_error():
    with three() as (_, leader, ends, told):
        leader.fail("engine rank 0 failed: y")
        with pytest.raises(EngineDeadError, match=r"^engine rank 0 failed: y$"):
            ends[0].receive()
        assert told[2].event.wait(ALL) and told[2].why == "engine rank 0 failed: y"
        assert told[0].why is None


def test_the_same_error_on_all_ranks_stays_what_it_is():
    with three() as (_, leader, ends, told):
        said = [None, None]

        def fail(number):
            said[number] = ends[number].fail(number + 1, "KV cache: too small")

        threads = [threading.Thread(target=fail, args=(number,)) for number in range(2)]
        for one in threads:
            one.start()
        time.sleep(0.1)
        leader.fail("KV cache: too small")
        for one in threads:
            one.join()
        assert told[0].why is None
        assert all(one.startswith("KV cache: too small") for one in said)


def test_who_comes_when_all_have_met_is_refused_and_disturbs_nobody():
    with three() as (address, leader, ends, told):
        for late in (MATES[0], msgspec.structs.replace(MATES[1], version="0.0.9")):
            one = joining(address)
            with pytest.raises(ConfigError, match=r"rank 1 .*came twice|runs ds-runtime 0\.0\.9"):
                one.greet(late, 20)
            one.close()
        leader.send(Word("a"))
        assert msgspec.msgpack.decode(ends[0].receive(), type=Word).text == "a"
        assert [one.why for one in told] == [None] * 3
        ends[1].close()
        assert told[0].event.wait(ALL) and "rank 2 on node 2" in told[0].why


def test_many_causes_are_heard_in_time():
    """The first is said last, by somebody who saw it."""
    with three() as (address, _, _, told):
        other = joining(address)
        for _ in range(200):
            other._end.socket.send(msgspec.msgpack.encode(Cause(Witness.SAID, 1, "later")))
        other._end.socket.send(msgspec.msgpack.encode(Cause(Witness.SEEN, 2, "the first")))
        assert told[0].event.wait(ALL) and told[0].why == "the first (on node 2)"
        other.close()


@given(st.lists(st.tuples(st.sampled_from(Witness), st.integers(1, 2)), min_size=1, max_size=6))
@settings(max_examples=examples(40))
def test_what_was_seen_is_first_then_what_came_first(said):
    """No clock of another machine has a say."""
    causes = [Cause(known, rank, f"{at}") for at, (known, rank) in enumerate(said)]
    first = first_of(causes)
    least = min(known for known, _ in said)
    assert int(first.message) == [known for known, _ in said].index(least)


def test_one_that_vanishes_is_named():
    with three() as (_, _, ends, told):
        ends[1].close()
        for one in told[:2]:
            assert one.event.wait(ALL)
            assert one.why.startswith("rank 2 on node 2 (127.0.0.1) has left, or cannot")


def test_who_is_busy_hears_the_word_to_leave_and_takes_it_after_its_steps():
    with three() as (_, leader, ends, told):
        leader.send(Word("a"))
        leader.leave()
        leader.close()
        time.sleep(SOON.silence)  # in a step
        assert [one.why for one in told] == [None] * 3
        for end in ends:
            data = end.receive()
            assert msgspec.msgpack.decode(data, type=Word).text == "a" and end.receive() == b""


def test_who_waits_hears_nothing_of_signs_of_life():
    with three() as (_, leader, ends, _):
        time.sleep(2.5 * SOON.sign)
        leader.send(Word("a"))
        assert msgspec.msgpack.decode(ends[0].receive(), type=Word).text == "a"


def test_a_rank_that_dies_while_others_are_awaited_is_missed_at_once():
    address = f"tcp://127.0.0.1:{free_port()}"
    leader, one, found = leading(address, TOLD_ONLY), joining(address, TOLD_ONLY), []

    def wait():
        with pytest.raises(EngineDeadError) as ended:
            leader.wait("there", 100, lives)
        found.append(str(ended.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    one._end.socket.send(msgspec.msgpack.encode(MATES[0]))
    time.sleep(SHARE)
    one.close()
    begin = time.monotonic()
    with others(address, (1.5 * SHARE, MATES[1]), limits=TOLD_ONLY) as late:
        waiting.join()
    assert (
        found[0].startswith("rank 1 on node 1 (127.0.0.1) has left")
        and time.monotonic() < begin + 50  # of the 100 that are waited for those who come
    )
    assert str(late[0].found) == found[0]
    leader.part()


def test_rank_0_that_dies_while_others_are_awaited_is_missed_at_once():
    address = f"tcp://127.0.0.1:{free_port()}"
    leader = leading(address, TOLD_ONLY)
    with others(address, MATES[0], limits=TOLD_ONLY) as found:
        time.sleep(0.5)
        begin = time.monotonic()
        leader.part()
    assert time.monotonic() - begin < ALL
    assert isinstance(found[0].found, EngineDeadError)
    assert str(found[0].found).startswith("rank 0 on node 0 (127.0.0.1")


def test_a_failure_before_all_have_met_is_told_with_its_reason():
    address = f"tcp://127.0.0.1:{free_port()}"
    leader = leading(address)
    with others(address, MATES[0], limits=SOON) as found:
        threading.Timer(
            0.3, report, (address, None, Cause(Witness.SEEN, 2, "rank 2: no device"), SOON)
        ).start()
        with pytest.raises(EngineDeadError, match=r"^rank 2: no device \(on node 2\)"):
            leader.wait("there", 20, lives)
        leader.part()
    assert str(found[0].found) == "rank 2: no device (on node 2)"


@pytest.mark.parametrize("after", [0.1, 2 * SOON.sign])
def test_who_comes_after_a_refusal_is_told_why(after):
    address = f"tcp://127.0.0.1:{free_port()}"
    leader, bad = leading(address), msgspec.structs.replace(MATES[0], version="0.0.9")
    with others(address, bad, (after, MATES[1]), limits=SOON) as found:
        with pytest.raises(ConfigError, match=r"runs ds-runtime 0\.0\.9") as refusal:
            leader.wait("there", 60, lives)
        leader.part()
    assert [str(one.found) for one in found] == [str(refusal.value)] * 2


def test_any_timeout_can_be_waited_for():
    address = f"tcp://127.0.0.1:{free_port()}"
    leader = leading(address, size=2)
    met = threading.Thread(target=leader.wait, args=("there", 1e12, lives))
    met.start()
    one = joining(address)
    assert one.greet(Hello(1, 2, OWN.plan, "m"), 1e12) == "there"
    met.join()
    leader.leave()
    one.close()
    leader.close()


@contextmanager
def starting(size=3, limits=SOON):
    """Rank 0 awaits others: its address, its end, and what its wait has ended with."""
    address = f"tcp://127.0.0.1:{free_port()}"
    leader, found = leading(address, limits, size), []

    def wait():
        with pytest.raises((ConfigError, EngineDeadError)) as ended:
            leader.wait("there", 100, lives)
        found.append(str(ended.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    yield address, leader, waiting, found
    waiting.join(ALL)
    assert not waiting.is_alive()
    leader.part()


def test_a_rank_that_dies_before_it_has_decided_anything_is_missed():
    with starting() as (address, _, waiting, found):
        one = joining(address)
        one.arrive(1)
        time.sleep(0.3)
        begin = time.monotonic()
        one._end.part()
        waiting.join(ALL)
        assert found[0].startswith("rank 1 on node 1 (127.0.0.1) has left, or cannot be reached")
        assert time.monotonic() - begin < ALL


@pytest.mark.parametrize("comes", [False, True])
def test_a_refusal_reaches_ranks_that_have_not_decided_yet(comes):
    """However long they take, though rank 0 has gone meanwhile."""
    with starting() as (address, _, waiting, found):
        ends = [joining(address), joining(address)]
        for end, mate in zip(ends, MATES, strict=True):
            end.arrive(mate.rank)
        bad = msgspec.structs.replace(MATES[0], version="0.0.9")
        time.sleep(0.3)
        with pytest.raises(ConfigError, match=r"runs ds-runtime 0\.0\.9"):
            ends[0].greet(bad, 20)
        waiting.join(SOON.refusing / 2)
        assert not waiting.is_alive(), "it knows that all have been told"
    time.sleep(SOON.sign)
    if comes:
        with pytest.raises(ConfigError) as refusal:
            ends[1].greet(MATES[1], 20)
        assert str(refusal.value) == found[0]
    else:  # it fails itself meanwhile
        assert ends[1].fail(2, "engine rank 2 failed: z") == found[0]
    for end in ends:
        end.close()


def test_a_rank_that_fails_before_it_has_decided_tells_at_once():
    with starting(2, TOLD_ONLY) as (address, _, waiting, found):
        one = joining(address, TOLD_ONLY)
        one.arrive(1)
        begin = time.monotonic()
        assert one.fail(1, "engine rank 1 failed: x") == "engine rank 1 failed: x (on node 1)"
        waiting.join(ALL)
        assert found == ["engine rank 1 failed: x (on node 1)"]
        assert time.monotonic() - begin < ALL
        one.close()


def test_rank_0_that_fails_before_it_awaits_others_tells_them():
    address = f"tcp://127.0.0.1:{free_port()}"
    leader = leading(address, size=2)
    with others(address, MATES[0], limits=SOON) as found:
        time.sleep(0.3)
        begin = time.monotonic()
        leader.fail("--tp 2: 1 devices are needed")
        leader.fail("--tp 2: 1 devices are needed")  # once is enough
        leader.part()
    assert time.monotonic() - begin < ALL
    assert str(found[0].found) == "--tp 2: 1 devices are needed"


@pytest.mark.parametrize("when", ["before it listened", "in the start", "at work"])
def test_why_rank_0_was_killed_is_told_by_another_in_its_place(when):
    address = f"tcp://127.0.0.1:{free_port()}"
    said = "engine rank 0 was ended by SIGKILL"
    begin = time.monotonic()
    if when == "at work":
        with three() as (address, leader, _, many):
            leader._end.part()
            instead(address, None, said, SOON)
            for told in many[1:]:
                assert told.event.wait(ALL) and told.why == said
    else:
        leader = leading(address) if when == "in the start" else None
        with others(address, *MATES, limits=SOON) as found:
            time.sleep(0.5)
            if leader is not None:
                leader._end.part()
            instead(address, None, said, SOON)
        assert [str(one.found) for one in found] == [said] * 2
    assert time.monotonic() - begin < ALL


def test_an_address_that_somebody_has_is_left_to_him():
    address = f"tcp://127.0.0.1:{free_port()}"
    leader, begin = leading(address), time.monotonic()
    instead(address, None, "x", replace(SOON, word=30.0))
    assert time.monotonic() - begin < 30
    leader.part()
