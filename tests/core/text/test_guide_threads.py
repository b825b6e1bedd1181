"""How many threads guides have: as many as have something to do, however late these are."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import pytest

from ds_runtime.grammar.followers import Following, _Pool
from ds_runtime.grammar.guide import Followed


class Gated:
    """A guide that follows once it may."""

    param, cost = "rule", 0.0

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def follow(self, *given: object) -> Followed:
        assert self._gate.wait(20)
        return Followed(0, None)


class Late(SimpleQueue[Following | None]):
    """A queue whose readers get no processor before the gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate

    def get(self, block: bool = True, timeout: float | None = None) -> Following | None:
        assert self.gate.wait(20)
        return super().get(block, timeout)


def follow(pool: _Pool, gate: threading.Event, count: int) -> list[Following]:
    made = [Following(Gated(gate), (), (), ()) for _ in range(count)]  # type: ignore[arg-type]
    for one in made:
        pool.put(one)
        for _ in range(20):
            pool.grow()
    return made


def until_done(asked: list[Following]) -> None:
    end = time.monotonic() + 20
    while any(one.found is None for one in asked):
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads_that_wait_for_a_processor_are_joined_by_no_others(count: int) -> None:
    pool, late, opened = _Pool(threading.Event()), threading.Event(), threading.Event()
    opened.set()
    pool._asked = Late(late)
    asked = follow(pool, opened, count)
    assert pool._threads == count
    late.set()
    until_done(asked)
    for _ in range(5):
        until_done(follow(pool, opened, count))
    assert pool._threads <= count + 1, "one may be about to look for more"
    pool.close()


@pytest.mark.parametrize("count", [1, 2, 7])
def test_none_waits_behind_one_that_has_become_heavy(count: int) -> None:
    pool, held, opened = _Pool(threading.Event()), threading.Event(), threading.Event()
    opened.set()
    stuck = follow(pool, held, count)
    end = time.monotonic() + 20
    while pool._idle or not pool._asked.empty():
        pool.grow()
        assert time.monotonic() < end
    quick = follow(pool, opened, 1)
    until_done(quick)
    assert all(one.found is None for one in stuck)
    held.set()
    until_done(stuck)
    pool.close()


class Stalled(SimpleQueue[Following | None]):
    """A queue whose readers have got something and get no processor before the gate opens."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate, self.got = gate, threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> Following | None:
        found = super().get(block, timeout)
        self.got.set()
        assert self.gate.wait(20)
        return found


@pytest.mark.parametrize("places", [1, 2, 3])
def test_a_heavy_one_asked_while_a_thread_begins_has_its_own_where_places_are_free(
    places: int,
) -> None:
    """Until that thread has said that it is busy, it counts as idle; nobody asks again."""
    pool, held, opened = _Pool(threading.Event(), places), threading.Event(), threading.Event()
    opened.set()
    gate = threading.Event()
    pool._asked = stalled = Stalled(gate)

    def put(until: threading.Event) -> Following:
        one = Following(Gated(until), (), (), ())  # type: ignore[arg-type]
        pool.put(one)
        return one

    slow = [put(held)]
    assert stalled.got.wait(20)
    slow += [put(held) for _ in range(places - 2)]
    quick = put(opened)
    gate.set()
    if places > 1:
        until_done([quick])
        assert all(one.found is None for one in slow)
    held.set()
    until_done([*slow, quick])
    assert pool._threads <= places
    pool.close()
