"""A disk that hangs, or whose threads raise: no step, no close and no engine ends by it."""

from __future__ import annotations

import errno
import io
import threading
import time
from concurrent.futures import Future
from contextlib import redirect_stderr
from functools import partial

import msgspec
import pytest
from hanging import Hangs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_disk_tier import NAME, HostBytes, named, views

from ds_runtime.kv.prefix import Node
from ds_runtime.kv.tiers.disk import Disk
from ds_runtime.kv.tiers.disks import Disks
from ds_runtime.kv.tiers.folder import DiskFolder, Sought
from ds_runtime.kv.tiers.hand import LOST, DiskHand
from ds_runtime.kv.tiers.host import BACK, HostTier, own_root
from ds_runtime.kv.tiers.linked import DiskDone, DiskFollower, DiskJob, DiskLink
from ds_runtime.kv.tiers.slots import TierSlots
from examples import examples


@given(kinds=st.sets(st.sampled_from(["page", "state"]), min_size=1), pages=st.integers(2, 6))
@settings(max_examples=examples(3), deadline=None)
def test_a_disk_that_deletes_nothing_is_waited_for_once_and_closes(tmp_path_factory, kinds, pages):
    """However many pages are forgotten: `forget` waits a second, and so does `close`."""
    folder, release = DiskFolder(tmp_path_factory.mktemp("d") / "cache", 10**6), threading.Event()
    disk = Disk(folder, DiskHand(folder, HostBytes(1)))
    folder.forget = lambda *given: release.wait(60)
    begin = time.monotonic()
    try:
        for number in range(pages):
            disk.forget(named(number), *kinds)
        assert time.monotonic() < begin + 1.9
        closing = threading.Thread(
            target=Disks([disk]).close, args=(lambda: False, lambda: 0), daemon=True
        )
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
    finally:
        release.set()


ERRORS = [MemoryError(), RuntimeError("of a driver"), ValueError(), OSError(errno.EIO, "broken")]


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", ["write", "read", "has"])
def test_no_error_of_a_disk_ends_an_engine(tmp_path, monkeypatch, capsys, way, error, follows):
    """Whatever a thread of it raises. Nothing is written then, or the page is computed."""
    folder, slots = DiskFolder(tmp_path / "cache", 10**6), TierSlots(8)
    folder.write(NAME, "page", views(bytes(100)))

    def fails(*given):
        raise error

    monkeypatch.setattr("ds_runtime.kv.tiers.folder._checksum", fails)
    if way != "write":
        monkeypatch.setattr(folder, way, fails)
    hand = DiskHand(folder, HostBytes(8))
    disk, follower = Disk(folder, hand), DiskFollower(hand, 0)
    if follows and way != "has":
        follower.take(DiskJob(number=1, group=0, way=way, kinds=["page"], name=named(2), slot=0))
        said = list[bytes]()
        until = time.monotonic() + 20
        while not said and time.monotonic() < until:
            said += follower.answers()
        (done,) = (msgspec.msgpack.decode(one, type=DiskDone) for one in said)
        assert done.nbytes == (0 if way == "write" else LOST)
        assert bool(done.stopped) == (way == "write")
    elif way == "write":
        disk.save(slots, "page", slots.take(named(2)), named(2))
        assert disk.drain(20)
    else:
        wanted = [(slots, "page", NAME, partial(slots.adopt, NAME))]
        sought = [Sought(NAME, way == "read", True)]
        made = disk.fetch(sought, lambda count: wanted[:count])
        until = time.monotonic() + 20
        while not made.done and time.monotonic() < until:
            disk.poll(seconds=0.1)
        assert made.done and not made.come
    if way == "write":
        why = "broken" if isinstance(error, OSError) else type(error).__name__
        assert why in folder.stopped and not [*folder.folder.glob("*/.*.tmp")]
        disk.poll()
        assert why in capsys.readouterr().err
    disk.close()
    slots.check()
    assert not slots._reserved


@given(saved=st.integers(0, 10), host=st.integers(4, 30), hangs=st.integers(0, 12))
@settings(max_examples=examples(25), deadline=None)
def test_closing_counts_what_has_never_been_on_its_way(tmp_path_factory, saved, host, hangs):
    """With write_back the device alone has pages: those that come after the disk hangs, too."""
    folder = DiskFolder(tmp_path_factory.mktemp("d") / "cache", 10**6)
    tier = HostTier(host, host, BACK, own_root)
    writes = Hangs(folder, "write", lambda number: number > hangs)
    tier.disk = disk = Disk(folder, DiskHand(folder, HostBytes(host)))
    nodes = [Node(Node(None, (), -1), (number,), number) for number in range(saved)]
    for number, node in enumerate(nodes):
        node.name = named(number)
    tier.proved(nodes)

    def settle():
        count = tier.settle()
        tier.drain()
        return count > 0

    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(text):
        patch.setattr("ds_runtime.kv.tiers.disks.PATIENCE", 0.3)
        try:
            Disks([disk]).close(settle, lambda: tier.unsettled)
        finally:
            writes.release.set()
    left = max(0, saved - hangs)
    assert f": {left} pages were not written" in text.getvalue() or not left
    assert text.getvalue().count("warning") == (left > 0)


@pytest.mark.parametrize("error", [MemoryError("none"), None], ids=["fails", "writes"])
def test_a_rank_s_own_end_and_closing_are_one_after_the_other(error):
    """A file ends in a thread of its own while rank 0 closes: its job has one end."""
    link, own = DiskLink(lambda job: None, lambda _: []), Future[int]()
    job = DiskJob(number=0, group=0, way="write", kinds=["page"], name=NAME, slot=0)
    future = link.ask(job, 0, own)
    ends = (own.set_result, 7) if error is None else (own.set_exception, error)
    with link._lock:  # as `close` has it while it takes all jobs
        ending = threading.Thread(target=ends[0], args=ends[1:], daemon=True)
        ending.start()
        ending.join(0.3)
        assert not future.done()
    ending.join(10)
    assert future.exception(0) is error and (error or future.result(0) == 7)
