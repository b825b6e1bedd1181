"""Peers that have let go of each other on one side only, and any order of words."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_socket_transfer import Liar, liar, made, pair, polled, small  # noqa: F401

from ds_runtime.kv.transfer import pieces, sockets
from ds_runtime.kv.transfer.pieces import (
    Cancel,
    Greeting,
    Notice,
    PageBytes,
    Read,
    Still,
    Stopped,
    Taken,
)
from ds_runtime.platform.kv_transfer import CacheBlocks, TransferError
from ds_runtime.platform.page_copies import TorchPageCopies
from examples import examples

ALL = CacheBlocks([0, 1, 2], [0])


@pytest.mark.parametrize("way", ["shared memory", "unix socket", "tcp"])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
@pytest.mark.parametrize("who", ["reader", "source"])
def test_one_that_lets_go_alone_is_noticed_and_met_anew(tmp_path, way, steps, who, monkeypatch):
    """In any state of a read: it fails within seconds, and the next one gives the right bytes."""
    monkeypatch.setattr(sockets, "_STILL", 0.05)
    monkeypatch.setattr(sockets, "SLOTS", 1)  # so that it does not end before
    with pair(tmp_path, way) as (here, there, own, others):
        polled(here, there, until=lambda _: here._mail.has_met(there.name))
        ticket = here.read(there.name, CacheBlocks([0, 1, 2, 3, 4, 5]), CacheBlocks([0] * 6), "r")
        for _ in range(steps):
            there.poll(), here.poll()
        if who == "source":
            there._lose(here.name, "is let go of")
        else:
            here._lose(there.name, "is let go of")
            assert here.attach(there.describe()) == there.name
        begin = time.monotonic()
        found = polled(here, there, until=lambda found: found.lost)
        assert found.lost == [there.name] and [t for t, _ in found.failed] == [ticket]
        assert time.monotonic() - begin < 3
        here.attach(there.describe())
        before = [cache.clone() for cache in own]
        again = here.read(there.name, CacheBlocks([5, 4]), CacheBlocks([1, 2]), "r")
        found = polled(here, there)
        assert found == ([again], [], [])
        for cache, other, old in zip(own[:2], others[:2], before[:2], strict=True):
            assert torch.equal(cache[5], other[1]) and torch.equal(cache[4], other[2])
            assert torch.equal(cache[:4], old[:4])


def test_both_meet_anew_whoever_begins(tmp_path):
    """Each lets go and attaches at once: one pair comes of it, and reads go both ways."""
    with pair(tmp_path) as (here, there, *_):
        polled(here, there, until=lambda _: here._mail.has_met(there.name))
        for _ in range(3):
            for one, other in ((here, there), (there, here)):
                if other.name in one._open:
                    one._lose(other.name, "is let go of")
                one.attach(other.describe())
        end, done = time.monotonic() + 10, set()
        while len(done) < 2 and time.monotonic() < end:
            for one, other in ((here, there), (there, here)):
                one.attach(other.describe())
                if one not in done and not one._open[other.name].reading:
                    one.read(other.name, CacheBlocks([1]), CacheBlocks([2]), "r")
                if one.poll().finished:
                    done.add(one)
            time.sleep(0.001)
        assert len(done) == 2
        pairs = here._mail.epochs(there.name), there._mail.epochs(here.name)
        assert pairs[0] == pairs[1][::-1]


def test_bytes_of_another_pair_reach_no_page(liar):  # noqa: F811
    """They name a read that there is, and its next piece."""
    before = [cache.clone() for cache in liar.own]
    liar.here.read(liar.name, CacheBlocks([0, 1]), CacheBlocks([0, 1]), "r")
    asked = liar.hears(Read)
    own, theirs = liar.mail.epochs(liar.here.name)
    word = msgspec.msgpack.encode(PageBytes(asked.number, 0, 0))
    none, old = bytes(16), bytes(15) + b"\1"
    for said in (own + none, own + old, old + theirs, none + theirs, theirs + own, b"", own):
        liar.raw(said, word, b"x" * 4096)
        liar.raw(said, word, b"x" * 4096, b"more")
    for _ in range(30):
        assert liar.here.poll() == ([], [], [])
        time.sleep(0.001)
    assert all(torch.equal(a, b) for a, b in zip(liar.own, before, strict=True))
    assert asked.number in liar.here._open[liar.name].reading


def test_one_that_greets_anew_ends_what_was_open_and_what_it_had_said(liar):  # noqa: F811
    ticket = liar.here.read(liar.name, CacheBlocks([0]), CacheBlocks([0]), "r")
    liar.say(Read(1, [0] * 200, [], False))
    liar.say(Notice(b"of before"))
    liar.hears(PageBytes)
    liar.mail.drop(liar.here.name)
    liar.greet()
    found = polled(liar.here, until=lambda found: found.lost)
    assert found == ([], [(ticket, f"peer {liar.name!r} was started again")], [liar.name])
    liar.hears(Greeting)
    assert not liar.here._open[liar.name].is_open and liar.here.notices() == []
    liar.say(Notice(b"of now"))
    polled(liar.here, until=lambda _: liar.here._notices)
    assert liar.here.notices() == [(liar.name, b"of now")]


def test_who_is_refused_is_told_why_at_once(tmp_path, monkeypatch):
    """One peer too many waits for no time limit."""
    (here, _), (one, _), (two, _) = (made(tmp_path) for _ in range(3))
    monkeypatch.setattr(sockets, "MOST_PEERS", 1)
    one.attach(here.describe())
    polled(here, one, until=lambda _: here._open)
    two.attach(here.describe())
    ticket = two.read(here.name, CacheBlocks([0]), CacheBlocks([0]), "r")
    found = polled(two, here)
    assert found.failed[0][0] == ticket
    assert "refuses: 1 peers are attached: that is the limit" in found.failed[0][1]
    for end in (here, one, two):
        end.close()


NUMBER = st.integers(0, 9)
SLOT = st.integers(0, pieces.SLOTS - 1)
BLOCKS = st.lists(st.integers(0, 7), max_size=9)
WORD = st.one_of(
    st.builds(Read, NUMBER, BLOCKS, BLOCKS, st.booleans()),
    st.builds(PageBytes, NUMBER, st.integers(0, 3), SLOT),
    st.builds(Taken, SLOT),
    st.builds(Cancel, NUMBER),
    st.builds(Stopped, NUMBER, st.text(max_size=9)),
    st.builds(Notice, st.binary(max_size=9)),
    st.just(Still()),
)
SAID = st.tuples(
    st.sampled_from(["words", "words", "words", "cut", "garbage", "parts", "other pair", "twice"]),
    WORD,
    st.binary(max_size=200),
    st.booleans(),
)


@given(said=st.lists(SAID, max_size=25))
@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
def test_whatever_a_peer_says_nothing_crashes_hangs_or_is_held(tmp_path_factory, said):
    """Cut, repeated, in any order, of other pairs, with bytes behind: each read ends once, no page
    changes that no read was of, and the engine next to it reads on."""
    folder = tmp_path_factory.mktemp("f")
    here, own = made(folder)
    liar = Liar(here, folder)  # noqa: F811
    liar.hears(Greeting)
    before = [cache.clone() for cache in own]
    tickets, ended = [], []

    def come() -> None:
        found = here.poll()
        ended.extend([*found.finished, *(ticket for ticket, _ in found.failed)])

    for how, word, tail, reads in said:
        if liar.name not in here._open:
            break
        if reads:
            tickets.append(here.read(liar.name, CacheBlocks([0]), CacheBlocks([0]), "r"))
        whole = msgspec.msgpack.encode(word)
        if how == "words":
            liar.raw(liar.pair, whole, tail)
        elif how == "twice":
            liar.raw(liar.pair, whole, tail), liar.raw(liar.pair, whole, tail)
        elif how == "cut":
            liar.raw(liar.pair, whole[: len(tail)], tail)
        elif how == "garbage":
            liar.raw(tail)
        elif how == "parts":
            liar.raw(*[liar.pair, whole, tail][: len(tail) % 3 + 1], tail, tail)
        else:
            liar.raw((tail + bytes(32))[:32], whole, tail)
        come()
    for ticket in tickets[::2]:
        here.release(ticket)
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        come()
    liar.other.close()
    end = time.monotonic() + 10
    while here._open and time.monotonic() < end:
        come()
    assert not here._open and not here._mail._lines, "all of it is let go of"
    assert len(ended) == len({*ended}) and {*tickets[1::2]} <= {*ended} <= {*tickets}
    for cache, old in zip(own[:3], before, strict=False):
        assert torch.equal(cache[1:], old[1:])
    there, _ = made(folder)
    here.attach(there.describe())
    ticket = here.read(there.name, CacheBlocks([1]), CacheBlocks([1]), "r")
    assert polled(here, there) == ([ticket], [], [])
    here.close(), there.close()


class Breaks(TorchPageCopies):
    """Raises in the middle."""

    def save(self, layers):
        raise OSError("the device has fallen off")

    load = save


@pytest.mark.parametrize("who", ["reader", "source"])
def test_copies_that_raise_are_the_callers_and_close_still_closes(tmp_path, who):
    with pair(tmp_path) as (here, there, *_):
        (here if who == "reader" else there)._copies = Breaks(torch.device("cpu"))
        here.read(there.name, ALL, ALL, "r")
        with pytest.raises(OSError, match="fallen off"):
            polled(here, there, until=lambda _: False)
        (here if who == "reader" else there).close()
        with pytest.raises(TransferError, match="is not attached"):
            (here if who == "reader" else there).read("x", ALL, ALL, "r")
