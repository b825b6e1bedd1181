"""Pages between engines: keys that mean the same everywhere, and the reference in host memory."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.kv.caches import allocate
from ds_runtime.kv.chain import page_keys
from ds_runtime.kv.keys import Origin
from ds_runtime.kv.pages import PagePool
from ds_runtime.kv.transfer import host
from ds_runtime.kv.transfer.host import HostTransfer
from ds_runtime.ops.contract import DeviceInfo, Facts
from ds_runtime.ops.contracts.caches import HistoryGroup, LaidGroup, StateGroup
from ds_runtime.ops.reference.layouts import LATENT_PAGES
from ds_runtime.platform.kv_transfer import MOST_BYTES, CacheBlocks, Description, TransferError
from ds_runtime.platform.page_copies import LayerBlocks, TorchPageCopies
from examples import examples

FACTS = Facts(DeviceInfo("cpu", "a CPU", "x86"), {"kv_lora": 3, "qk_rope": 1}, page_size=4)
GROUPS = (HistoryGroup("kv", (0, 1)), HistoryGroup("far", (0,), ratio=4), StateGroup("near", (0,)))
PAGES, STATES = 6, 3
CPU = torch.device("cpu")
ORIGIN = Origin("sha", (("kv", "latent_pages.v1"), ("far", "pairs.v1")), ("bfloat16",), 16)


def made(name, net, origin=b"same", pages=PAGES):
    laid = [LaidGroup(g, LATENT_PAGES, g.within(FACTS)) for g in GROUPS]
    caches = allocate(laid, pages, STATES, CPU)
    for cache in caches:
        cache.copy_(torch.rand_like(cache))
    one = HostTransfer(name, origin, net)
    one.register(caches, pages, STATES, TorchPageCopies(CPU))
    return one, caches


def pair():
    net: dict = {}
    (here, own), (there, others) = made("here", net), made("there", net)
    assert here.attach(there.describe()) == "there"
    return here, there, list(own), list(others)


@st.composite
def blocks_of_both(draw):
    """Blocks here, each a place of its own, and there."""
    pages = draw(st.lists(st.integers(0, PAGES - 1), unique=True, max_size=PAGES))
    states = draw(st.lists(st.integers(0, STATES - 1), unique=True, max_size=STATES))
    there = [draw(st.integers(0, PAGES - 1)) for _ in pages]
    return CacheBlocks(pages, states), CacheBlocks(
        there, [draw(st.integers(0, STATES - 1)) for _ in states]
    )


def assert_read(own, before, others, local, remote):
    """The blocks that were read are the others', and all else is as before."""
    for cache, old, other, of in zip(own, before, others, (0, 0, 0, 1), strict=True):
        for block in range(len(cache)):
            read = block in local[of]
            wanted = other[remote[of][local[of].index(block)]] if read else old[block]
            assert torch.equal(cache[block], wanted)


@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_blocks_come_byte_for_byte_and_others_stay(data):
    here, _, own, others = pair()
    local, remote = data.draw(blocks_of_both())
    before = [cache.clone() for cache in own]
    ticket = here.read("there", local, remote, "r")
    assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True)), "nothing before a poll"
    assert here.poll() == ([ticket], [], []) and here.poll() == ([], [], [])
    assert_read(own, before, others, local, remote)


@pytest.mark.parametrize("when", ["before", "begun", "ended"])
@pytest.mark.parametrize("who", ["here", "there"])
def test_no_page_is_lost_when_either_side_ends(when, who):
    """In each state of a read: pages are free again, once they were told of or given up."""
    here, there, *_ = pair()
    pool, gone = PagePool(PAGES), here if who == "here" else there
    if when == "before":
        gone.close()
    pages = pool.alloc(3)
    ticket = here.read("there", CacheBlocks(pages), CacheBlocks([0, 1, 2]), "r")
    if when == "begun":
        gone.close()
    polled = here.poll()
    if when == "ended":
        gone.close()
    if who == "here" and when == "begun":
        assert polled == ([], [], [])
        here.release(ticket)
    elif who == "there" and when != "ended":
        assert polled == ([], [(ticket, "peer 'there' is gone")], ["there"])
    else:
        assert polled == ([ticket], [], [])
    pool.free(pages)
    assert pool.num_free == PAGES and here.poll()[:2] == ([], [])


def test_a_read_that_was_given_up_writes_nothing():
    here, _, own, _ = pair()
    before = [cache.clone() for cache in own]
    kept, given_up = (here.read("there", CacheBlocks([n]), CacheBlocks([0]), "r") for n in (1, 2))
    here.release(given_up)
    assert here.poll() == ([kept], [], [])
    assert all(torch.equal(a[2], b[2]) for a, b in zip(own[:3], before, strict=False))


@pytest.mark.parametrize(
    ("local", "remote", "said"),
    [
        ([0], [PAGES], "page 6 there: there are 6"),
        ([-1], [0], "page -1 here"),
        ([0, 1], [0], "1 pages to 2"),
        ([0, 0], [0, 1], "give each a place of its own"),
        (list(range(1 << 17)), list(range(1 << 17)), "65536 at most"),
    ],
)
def test_a_read_of_what_is_not_there_is_refused(local, remote, said):
    here, *_ = pair()
    with pytest.raises(TransferError, match=said):
        here.read("there", CacheBlocks(local), CacheBlocks(remote), "r")
    with pytest.raises(TransferError, match="state 3 there: there are 3"):
        here.read("there", CacheBlocks(states=[0]), CacheBlocks(states=[STATES]), "r")
    with pytest.raises(TransferError, match="'nobody' is not attached"):
        here.read("nobody", CacheBlocks([0]), CacheBlocks([0]), "r")
    assert here.poll() == ([], [], [])


@given(garbage=st.binary(max_size=60))
def test_what_is_no_description_is_refused(garbage):
    here, _ = made("here", {})
    with pytest.raises(TransferError, match=r"is no description|mean nothing here|moves pages by"):
        here.attach(garbage)


def test_pages_of_another_origin_and_long_words_are_refused():
    net: dict = {}
    here, _ = made("here", net)
    other, _ = made("other", net, origin=b"another")
    with pytest.raises(TransferError, match="peer 'other': its pages are of another model"):
        here.attach(other.describe())
    with pytest.raises(TransferError, match="'here' is this engine itself"):
        here.attach(here.describe())
    fewer = msgspec.msgpack.decode(here.describe(), type=Description)
    with pytest.raises(TransferError, match="'here' is this engine itself"):
        here.attach(here.describe())
    fewer = msgspec.structs.replace(fewer, name="x", regions=fewer.regions[:1])
    with pytest.raises(TransferError, match="mean nothing here"):
        here.attach(msgspec.msgpack.encode(fewer))
    with pytest.raises(TransferError, match="moves pages by 'rdma', and this engine by 'host'"):
        here.attach(msgspec.msgpack.encode(msgspec.structs.replace(fewer, kind="rdma")))
    with pytest.raises(TransferError, match=f"the limit is {MOST_BYTES}"):
        here.attach(bytes(MOST_BYTES + 1))
    with pytest.raises(TransferError, match=f"the limit is {MOST_BYTES}"):
        here.notify("other", bytes(MOST_BYTES + 1))


def test_a_peer_with_fewer_pages_than_it_said_fails_the_read_alone():
    net: dict = {}
    (here, own), (there, _) = made("here", net), made("there", net)
    said = msgspec.msgpack.decode(there.describe(), type=Description)
    here.attach(msgspec.msgpack.encode(msgspec.structs.replace(said, pages=10**12)))
    before = next(iter(own)).clone()
    bad, good = (
        here.read("there", CacheBlocks([mine]), CacheBlocks([its]), "r")
        for mine, its in ((0, 5000), (1, 2))
    )
    polled = here.poll()
    assert polled.finished == [good]
    assert polled.failed == [(bad, f"peer 'there' has {PAGES} pages, and had said more")]
    assert torch.equal(next(iter(own))[0], before[0])


def test_notices_that_nobody_takes_are_bounded(monkeypatch):
    monkeypatch.setattr(host, "MOST_NOTICES", 3)
    here, there, *_ = pair()
    for _ in range(3):
        here.notify("there", b"done")
    with pytest.raises(TransferError, match="has not taken the last 3 notices"):
        here.notify("there", b"done")
    assert len(there.notices()) == 3
    here.notify("there", b"done")


def test_notices_reach_a_peer_once():
    here, there, *_ = pair()
    here.notify("there", b"done")
    here.notify("gone", b"lost")
    assert there.notices() == [("here", b"done")] and there.notices() == []


@given(
    one=st.lists(st.integers(0, 3), max_size=12),
    other=st.lists(st.integers(0, 3), max_size=12),
    size=st.integers(1, 4),
)
def test_keys_are_equal_where_all_tokens_in_front_are(one, other, size):
    root = ORIGIN.root()
    first, second = list(page_keys(root, one, size)), list(page_keys(root, other, size))
    assert len(first) == len(one) // size
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        end = (number + 1) * size
        assert (a == b) == (one[:end] == other[:end])


def test_a_key_is_a_sha256_of_the_one_before_and_of_int32_tokens():
    root = ORIGIN.root()
    (key,) = page_keys(root, [1, 258, 9], 2)
    assert key == hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 1, 0, 0])).digest()


def test_a_root_depends_on_everything_that_bytes_depend_on():
    others = [
        replace(ORIGIN, weights="other"),
        replace(ORIGIN, layouts=(("kv", "latent_pages.v1"),)),
        replace(ORIGIN, layouts=(("kv", "latent_pages.v1"), ("far", "pairs.v2"))),
        replace(ORIGIN, dtypes=("bfloat16", "bfloat16")),
        replace(ORIGIN, page_size=32),
        replace(ORIGIN, adapter="a"),
        replace(ORIGIN, salt="a"),
        replace(ORIGIN, adapter="a", salt="b"),
        replace(ORIGIN, adapter="ab"),
        replace(ORIGIN, shard=(0, 2)),
        replace(ORIGIN, shard=(1, 2)),
        replace(ORIGIN, computed=("cpu",)),
        replace(ORIGIN, computed=("c", "pu")),
    ]
    roots = {one.root() for one in (ORIGIN, *others)}
    assert len(roots) == len(others) + 1 and replace(ORIGIN).root() == ORIGIN.root()


class Queues:
    """What torch has for a device with streams: its work is done once somebody waits for it."""

    def __init__(self) -> None:
        self.queue: list = []

    class Event:
        def record(self, stream) -> None:
            """Nobody asks."""

    def Stream(self, device):
        return self

    current_stream = Stream

    def stream(self, stream):
        return nullcontext()

    def wait_stream(self, stream) -> None:
        """There is one."""

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("way", ["save", "load"])
def test_copies_that_raise_midway_have_nothing_under_way(fails, way):
    """Whoever gave the blocks and the host memory may give them to others."""
    copies, runtime = TorchPageCopies(CPU), Queues()
    copies._runtime, copies._stream = runtime, runtime
    copies._numbers = lambda blocks: torch.tensor(blocks)
    caches = [torch.rand(4, 3) for _ in range(3)]

    def copy(one, numbers):
        if one.cache is caches[fails]:
            raise OSError("no kernel")
        runtime.queue.append(lambda: one.host.fill_(1))

    setattr(copies, f"_{way}", copy)
    given = [LayerBlocks(one, None, [1], torch.zeros(1, 12).byte()) for one in caches]
    with pytest.raises(OSError, match="no kernel"):
        getattr(copies, way)(given)
    assert not runtime.queue
    assert [bool(one.host.all()) for one in given] == [n < fails for n in range(3)]
