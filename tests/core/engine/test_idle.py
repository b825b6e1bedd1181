"""What the engine's process does while there is no work: prepare, but not between two requests."""

from __future__ import annotations

import threading
import time

import pytest
import zmq

from ds_runtime.engine.messages import Abort, Stats, Stop, encoder
from ds_runtime.engine.process import loop


class Idle:
    """An engine that never has work, and a number of things to prepare."""

    has_work = False

    def __init__(self, things: int) -> None:
        self.left, self.taken = things, 0

    def prepare(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def abort(self, rids) -> None:
        self.taken += 1

    def step(self):
        return []

    def stats(self) -> Stats:
        return Stats(pages_total=1)


class NoDesk:
    """Nobody asks for pages. turn: milliseconds between looks whether a peer does."""

    busy, moves, counts = False, False, {}

    def __init__(self) -> None:
        self.turn, self.looks = None, 0

    def poll(self):
        self.looks += 1
        return []


@pytest.fixture(params=[None, 5])
def running(monkeypatch, request):
    """A loop over an idle engine, and where to send it messages. A quarter of a second is long."""
    monkeypatch.setattr(loop, "_IDLE", 250)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    to, sink = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for bound, other, name in ((inbox, to, "to"), (outbox, sink, "from")):
        bound.bind(f"inproc://{name}")
        other.connect(f"inproc://{name}")
    engine, desk = Idle(5), NoDesk()
    desk.turn = request.param
    thread = threading.Thread(target=loop.EngineLoop(engine, inbox, outbox, desk).run)
    thread.start()
    yield engine, to, desk, sink
    to.send(encoder.encode(Stop()))
    thread.join(5)
    assert not thread.is_alive()
    context.destroy(linger=0)


def until(true):
    """Wait for what happens sooner or later."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_is_prepared_after_a_while(running):
    engine, *_ = running
    until(lambda: engine.left < 0)  # it is asked again at each look for peers


def test_nothing_is_prepared_between_requests(monkeypatch, running):
    """They come for longer than it would take without them."""
    engine, to, *_ = running
    monkeypatch.setattr(loop, "_IDLE", 900)
    for number in range(1, 31):
        to.send(encoder.encode(Abort(["none"])))
        until(lambda number=number: engine.taken == number)
        time.sleep(0.04)
        assert engine.left == 5


def test_peers_are_looked_after_without_work_and_without_noise(running):
    """Every few milliseconds once pages have been handed over, before all is prepared and after;
    what the front end knows already it is not told again."""
    engine, to, desk, sink = running

    def looked():
        begin, looks = time.monotonic(), desk.looks
        if desk.turn is None:
            time.sleep(0.1)
            assert desk.looks <= looks + 5
        else:
            until(lambda: desk.looks > looks + 5)
            time.sleep(0.1)
        assert desk.looks < looks + 50 * max(1, (time.monotonic() - begin) / 0.1)

    looked()
    until(lambda: engine.left < 0)
    told = 0
    looked()
    while sink.poll(0):
        sink.recv()
        told += 1
    assert told == 1
    to.send(encoder.encode(Abort(["none"])))
    assert sink.poll(5000), "something may have changed"


def test_all_is_prepared_while_others_may_still_read_pages(running):
    """A lease that waits for its reader, for an hour perhaps, is no haste."""
    engine, _, desk, _ = running
    desk.busy = True
    until(lambda: engine.left < 0)


def test_nothing_is_prepared_while_pages_move(running):
    engine, to, desk, _ = running
    desk.busy = desk.moves = True
    desk.turn = 1
    to.send(encoder.encode(Abort(["none"])))
    time.sleep(0.4)
    assert engine.left == 5
