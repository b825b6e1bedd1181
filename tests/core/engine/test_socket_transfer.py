"""Pages between processes: by shared memory, by sockets, and with peers that die or lie."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager

import msgspec
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_page_transfer import CPU, FACTS, GROUPS, PAGES, STATES, assert_read, blocks_of_both

from ds_runtime.kv.caches import allocate
from ds_runtime.kv.transfer import mailbox, pieces, sockets
from ds_runtime.kv.transfer.pieces import Greeting, Notice, PageBytes, Read, Stopped, Taken, Words
from ds_runtime.kv.transfer.shared_memory import Offered, open_shared, share
from ds_runtime.kv.transfer.sockets import SocketTransfer
from ds_runtime.ops.contracts.caches import LaidGroup
from ds_runtime.ops.reference.layouts import LATENT_PAGES
from ds_runtime.platform.kv_transfer import CacheBlocks, Description, TransferError
from ds_runtime.platform.page_copies import TorchPageCopies
from examples import examples

SECONDS = 20.0  # in which whatever ends has ended
WAYS = ("shared memory", "unix socket", "tcp")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A read takes many pieces."""
    monkeypatch.setattr(sockets, "PIECE", 100)


def made(folder, way="shared memory", seed=0, origin=b"same"):
    laid = [LaidGroup(g, LATENT_PAGES, g.within(FACTS)) for g in GROUPS]
    caches = allocate(laid, PAGES, STATES, CPU)
    random = torch.Generator().manual_seed(seed)
    for cache in caches:
        cache.copy_(torch.rand(cache.shape, generator=random))
    number = len(list(folder.iterdir()))
    address = "tcp://127.0.0.1:*" if way == "tcp" else f"ipc://{folder}/{number}"
    one = SocketTransfer(origin, address, way == "shared memory")
    one.register(caches, PAGES, STATES, TorchPageCopies(CPU))
    return one, list(caches)


def polled(here, *others, until=lambda found: found.finished or found.failed):
    """What `here` polls first, the others coming by."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for other in others:
            other.poll()
        if until(found := here.poll()):
            return found
        time.sleep(0.001)
    raise AssertionError("nothing has ended")


@contextmanager
def pair(folder, way="shared memory"):
    (here, own), (there, others) = made(folder, way), made(folder, way, seed=1)
    try:
        assert here.attach(there.describe()) == there.name
        yield here, there, own, others
    finally:
        here.close()
        there.close()


@pytest.mark.parametrize("way", [*WAYS, "page-locked shared memory", "page-locked tcp"])
def test_blocks_come_byte_for_byte(tmp_path, way):
    with pair(tmp_path, way.removeprefix("page-locked ")) as (here, there, own, others):
        here._locked = there._locked = way.startswith("page-locked")

        @given(blocks=st.lists(blocks_of_both(), min_size=1, max_size=3))
        @settings(max_examples=examples(25), deadline=None)
        def reads(blocks):
            for local, remote in blocks:
                before = [cache.clone() for cache in own]
                ticket = here.read(there.name, local, remote, "r")
                assert polled(here, there) == ([ticket], [], [])
                assert_read(own, before, others, local, remote)

        reads()
        assert (here._open[there.name].theirs is not None) == way.endswith("shared memory")
        polled(there, here, until=lambda _: len(there._open[here.name].free) == pieces.SLOTS)
        assert sorted(there._open[here.name].free) == list(range(pieces.SLOTS))


def test_both_read_at_once_and_many_reads_end_in_turn(tmp_path):
    with pair(tmp_path) as (here, there, own, others):
        before = [cache.clone() for cache in own], [cache.clone() for cache in others]
        there.attach(here.describe())
        mine = [here.read(there.name, CacheBlocks([n]), CacheBlocks([n]), "a") for n in (0, 1, 2)]
        its = [there.read(here.name, CacheBlocks([n]), CacheBlocks([n]), "b") for n in (3, 4)]
        found = ([], [])
        while len(found[0]) < 3 or len(found[1]) < 2:
            found[0].extend(polled(here, until=lambda _: True).finished)
            found[1].extend(polled(there, until=lambda _: True).finished)
        assert found == (mine, its)
        for cache, other, a, b in zip(own[:2], others[:2], before[0], before[1], strict=False):
            assert torch.equal(cache[:3], b[:3]) and torch.equal(other[3:5], a[3:5])


def test_a_read_that_was_given_up_writes_nothing_more(tmp_path):
    with pair(tmp_path) as (here, there, own, _):
        given_up = here.read(there.name, CacheBlocks(range(PAGES)), CacheBlocks(range(PAGES)), "a")
        for _ in range(3):
            here.poll(), there.poll()
        here.release(given_up)
        before = [cache.clone() for cache in own]
        ticket = here.read(there.name, CacheBlocks(states=[0]), CacheBlocks(states=[1]), "b")
        assert polled(here, there) == ([ticket], [], [])
        assert all(torch.equal(a, b) for a, b in zip(own[:3], before, strict=False))
        polled(there, here, until=lambda _: len(there._open[here.name].free) == pieces.SLOTS)


def test_notices_go_both_ways_and_in_order(tmp_path):
    with pair(tmp_path) as (here, there, *_):
        for word in (b"1", b"2"):
            here.notify(there.name, word)
        polled(there, here, until=lambda _: len(there._notices) == 2)
        assert there.notices() == [(here.name, b"1"), (here.name, b"2")] and not there.notices()
        there.notify(here.name, b"3")
        polled(here, there, until=lambda _: here._notices)
        assert here.notices() == [(there.name, b"3")]
        here.notify("nobody", b"lost")


# ---- peers that die ----


def serve(folder, pipe, stalls):
    """Another process, which has pages. stalls: it comes by once, and no more."""
    torch.set_num_threads(1)
    there, _ = made(folder, seed=1)
    pipe.send_bytes(there.describe())
    while True:
        there.poll()
        if stalls and there._peers:
            pipe.send_bytes(b"stalls")
            time.sleep(60)
        if any(peer.serving or len(peer.free) < pieces.SLOTS for peer in there._open.values()):
            pipe.send_bytes(b"reads")
        time.sleep(0.001)


@contextmanager
def process(folder, stalls=False):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=serve, args=(folder, theirs, stalls), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours.recv_bytes(), ours
    finally:
        child.kill()
        child.join()


@pytest.fixture
def hasty(monkeypatch):
    """Silence is noticed in less than a second."""
    for name, value in (("PATIENCE", 0.6), ("_SIGN", 100), ("_SILENCE", 400)):
        monkeypatch.setattr(mailbox, name, value)


@pytest.mark.slow
def test_silence_is_noticed_within_seconds(tmp_path):
    fails_reads(tmp_path, "met", signal.SIGSTOP)


@pytest.mark.parametrize("when", ["before", "met", "begun", "ended"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_fails_reads(tmp_path, when, how, hasty):
    """In each state of a read; one that is only stopped gives no sign of life, either."""
    fails_reads(tmp_path, when, how)


def fails_reads(tmp_path, when, how):
    here, _ = made(tmp_path)
    with process(tmp_path, stalls=when == "begun") as (child, description, pipe):
        if when == "before":
            os.kill(child.pid, how)
        name = here.attach(description)
        if when == "met":
            polled(here, until=lambda _: here._mail.has_met(name))
        if when == "begun":
            assert pipe.recv_bytes() == b"stalls"
        if when == "ended":
            here.read(name, CacheBlocks([0]), CacheBlocks([0]), "r")
            assert len(polled(here).finished) == 1
        if when in ("met", "ended"):
            os.kill(child.pid, how)
        ticket = here.read(name, CacheBlocks([1, 2]), CacheBlocks([0, 1]), "r")
        if when == "begun":
            os.kill(child.pid, how)
        found = polled(here)
        assert found.finished == [] and found.lost == [name]
        assert [t for t, _ in found.failed] == [ticket]
        (_, why), *_ = found.failed
        assert why.startswith(f"peer {name!r} ") and any(
            one in why for one in ("left", "did not answer", "takes nothing")
        )
        with pytest.raises(TransferError, match="is not attached, or gone"):
            here.read(name, CacheBlocks([0]), CacheBlocks([0]), "r")
        with process(tmp_path) as (_, again, _):
            other = here.attach(again)
            assert other != name, "one that is restarted is another"
            ticket = here.read(other, CacheBlocks([1, 2]), CacheBlocks([0, 1]), "r")
            assert polled(here) == ([ticket], [], [])
    here.close()


def test_a_reader_that_dies_is_forgotten_with_all_that_it_read(tmp_path):
    here, _ = made(tmp_path)
    with process(tmp_path) as (child, description, _):
        name = here.attach(description)
        polled(here, until=lambda _: here._mail.has_met(name))
        line = here._mail._lines[name]
        os.kill(child.pid, signal.SIGKILL)
        found = polled(here, until=lambda found: found.lost)
        assert found == ([], [], [name]) and not here._open and not here._peers
        assert line.socket.closed
    here.close()


# ---- peers that lie ----


class Liar:
    """Speaks to a transfer in words of its own."""

    def __init__(self, here, folder) -> None:
        self.other, _ = made(folder)
        self.name, self.here = self.other.name, here
        self.mail = self.other._mail
        here_said = msgspec.msgpack.decode(here.describe(), type=Description)
        self.where = msgspec.msgpack.decode(here_said.where, type=mailbox.Where)
        self.greet()

    def greet(self) -> None:
        self.mail.open(self.here.name, self.where, Greeting(self.other.describe()))

    def say(self, message, data=b"") -> None:
        self.mail.send(self.here.name, message, data)

    @property
    def pair(self) -> bytes:
        return b"".join(self.mail.epochs(self.here.name))

    def raw(self, *parts: bytes) -> None:
        self.mail._lines[self.here.name].socket.send_multipart(parts)

    def hears(self, kind):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            self.here.poll()
            for heard in self.mail.receive():
                if isinstance(heard.message, Greeting):
                    self.mail.meet(self.here.name, heard.epoch)
                if isinstance(heard.message, kind):
                    return heard.message
        raise AssertionError("it said nothing")


@pytest.fixture
def liar(tmp_path):
    here, own = made(tmp_path, "unix socket")
    one = Liar(here, tmp_path)
    one.hears(Greeting)
    one.own = own
    yield one
    one.other.close()
    here.close()


@pytest.mark.parametrize(
    ("pages", "states", "shared", "said"),
    [
        ([PAGES], [], False, "there are 6 pages and 3 states"),
        ([0], [STATES], False, "there are 6 pages and 3 states"),
        ([0], [], True, "it shares no memory"),
    ],
)
def test_a_read_of_what_is_not_there_is_stopped(liar, pages, states, shared, said):
    liar.say(Read(7, pages, states, shared))
    assert liar.hears(Stopped) == Stopped(7, said)
    liar.say(Read(8, [0], [], False))
    assert liar.hears(PageBytes).number == 8, "and the others go on"


def test_reads_and_slots_of_a_peer_are_bounded(liar, monkeypatch):
    monkeypatch.setattr(sockets, "MOST_READS", 3)
    for number in range(5):
        liar.say(Read(number, [*range(PAGES)] * 20, [], False))
    assert liar.hears(Stopped).why == "3 reads are under way: that is the limit"
    peer = liar.here._open[liar.name]
    for _ in range(5):
        liar.here.poll()
    assert peer.free == [] and len(peer.serving) == 3, "nobody takes pieces, so no more are made"
    for _ in range(9):
        liar.say(Taken(0))
    liar.hears(PageBytes)
    for _ in range(5):
        liar.here.poll()
    assert len(peer.free) <= 1 and len({*peer.free}) == len(peer.free)


@pytest.mark.parametrize("index", [1, 5])
@pytest.mark.parametrize("size", [0, 1, 99])
def test_another_piece_than_was_due_fails_the_read_alone(liar, index, size):
    before = [cache.clone() for cache in liar.own]
    ticket = liar.here.read(liar.name, CacheBlocks([0, 1]), CacheBlocks([0, 1]), "r")
    asked = liar.hears(Read)
    liar.say(PageBytes(asked.number, index, 0), bytes(size))
    found = polled(liar.here)
    assert found == ([], [(ticket, f"peer {liar.name!r} sent another piece than was due")], [])
    assert all(torch.equal(a, b) for a, b in zip(liar.own, before, strict=True))


def test_a_piece_that_is_too_short_fails_the_read_alone(liar):
    ticket = liar.here.read(liar.name, CacheBlocks([0, 1]), CacheBlocks([0, 1]), "r")
    liar.say(PageBytes(liar.hears(Read).number, 0, 0), bytes(3))
    assert [t for t, _ in polled(liar.here).failed] == [ticket]


def test_pieces_that_nobody_awaits_are_given_back(liar):
    liar.say(PageBytes(99, 0, 2), bytes(3))
    assert liar.hears(Taken) == Taken(2)


@given(data=st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_is_no_message_is_no_crash(tmp_path_factory, data):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        msgspec.msgpack.decode(b"\xc1" + data, type=Words)
    for form in (Words, Description, mailbox.Where):
        try:
            msgspec.msgpack.decode(data, type=form)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa4Read", b"\xa2\xff\xfe"])
def test_a_peer_that_speaks_no_words_is_lost(liar, data):
    ticket = liar.here.read(liar.name, CacheBlocks([0]), CacheBlocks([0]), "r")
    liar.raw(liar.pair, data)
    found = polled(liar.here)
    assert found.lost == [liar.name]
    assert found.failed[0][0] == ticket and "sent what is no message" in found.failed[0][1]


def test_numbers_and_lengths_have_bounds():
    for wrong in (
        Read(1, [-1], [], False),
        Read(1, [1 << 41], [], False),
        Read(1, [0] * ((1 << 16) + 1), [], False),
        PageBytes(1, 0, pieces.SLOTS),
        Taken(-1),
        Stopped(1, "x" * 501),
        Notice(bytes((1 << 18) + 1)),
        Greeting(b"", Offered(1, 1, 1 << 35, bytes(32))),
        Greeting(b"", Offered(1, 1, 1, bytes(31))),
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=Words)


def test_notices_that_nobody_takes_end_with_their_peer(liar, monkeypatch):
    monkeypatch.setattr(sockets, "MOST_NOTICES", 3)
    for _ in range(5):
        liar.say(Notice(b"x"))
    found = polled(liar.here, until=lambda found: found.lost)
    assert found.lost == [liar.name] and not liar.here.notices(), "they are of a peer that is gone"


def test_strangers_are_not_heard(tmp_path):
    """Over TCP without the key nothing is even read; elsewhere a name alone does nothing."""
    here, _ = made(tmp_path, "tcp")
    there, _ = made(tmp_path, "unix socket")
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    for one, socket in zip((here, there), sockets, strict=True):
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(one._mail.where.address)
        for message in (Read(1, [0], [], False), Notice(b"x"), Greeting(here.describe())):
            socket.send(msgspec.msgpack.encode(message))
        socket.send(b"\xc1")
    for _ in range(50):
        assert here.poll() == there.poll() == ([], [], [])
        time.sleep(0.002)
    assert not here.notices() and not there.notices() and not here._open and not there._open
    for socket in sockets:
        socket.close()
    context.term()
    here.close(), there.close()


def test_peers_are_bounded_and_of_one_origin(tmp_path, monkeypatch):
    monkeypatch.setattr(sockets, "MOST_PEERS", 1)
    here, _ = made(tmp_path)
    other, _ = made(tmp_path, origin=b"another")
    with pytest.raises(TransferError, match="mean nothing here"):
        here.attach(other.describe())
    first, second = made(tmp_path)[0], made(tmp_path)[0]
    here.attach(first.describe())
    with pytest.raises(TransferError, match="1 peers are attached: that is the limit"):
        here.attach(second.describe())
    nowhere = msgspec.msgpack.decode(second.describe(), type=Description)
    monkeypatch.setattr(sockets, "MOST_PEERS", 9)
    for where in (b"", msgspec.msgpack.encode(mailbox.Where("inproc://x"))):
        lost = msgspec.structs.replace(nowhere, where=where)
        with pytest.raises(TransferError, match="does not say where it is"):
            here.attach(msgspec.msgpack.encode(lost))
    with pytest.raises(TransferError, match="cannot be had"):
        SocketTransfer(b"", "ipc:///no/such/folder").register(
            allocate([], 0, 0, CPU), 0, 0, TorchPageCopies(CPU)
        )
    for one in (here, other, first, second):
        one.close()


def test_memory_that_is_another_is_not_taken(tmp_path):
    own = share(100, 2)
    assert own is not None and own.offered is not None
    own[1][:3] = torch.tensor([1, 2, 3])
    there = open_shared(own.offered, 100, 2)
    assert there is not None and there[1][:3].tolist() == [1, 2, 3]
    offered = own.offered
    (file := tmp_path / "file").write_bytes(bytes(offered.size))
    with file.open("r+b") as plain:
        for other in (
            msgspec.structs.replace(offered, proof=bytes(32)),
            msgspec.structs.replace(offered, size=offered.size + 1),
            msgspec.structs.replace(offered, file=999_999),
            msgspec.structs.replace(offered, process=1 << 30),
            msgspec.structs.replace(offered, file=plain.fileno()),
        ):
            assert open_shared(other, 100, 2) is None


def test_where_no_shared_memory_can_be_made_there_is_none(monkeypatch):
    """As where a sandbox forbids it, or no file can be opened any more."""

    def refused(*given):
        raise OSError(errno.EPERM, "not allowed")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert share(100, 2) is None
