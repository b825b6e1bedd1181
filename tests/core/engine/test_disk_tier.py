"""Pages on disk: read back as they were written or not at all, whoever dies meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from fake_device import LONG, asked
from hanging import Hangs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toy_model import ToyDevice, toy

from ds_runtime.errors import CheckpointError, ConfigError
from ds_runtime.kv.chain import page_keys
from ds_runtime.kv.keys import Origin
from ds_runtime.kv.prefix import OWN, Realm
from ds_runtime.kv.tiers.disk import Disk, _Writing
from ds_runtime.kv.tiers.disks import Disks
from ds_runtime.kv.tiers.folder import DiskFolder
from ds_runtime.kv.tiers.hand import LOST, DiskHand
from ds_runtime.kv.tiers.host import BACK, POLICIES, own_root
from ds_runtime.kv.tiers.linked import DiskFollower, DiskJob
from ds_runtime.kv.tiers.pace import BringPace
from ds_runtime.kv.tiers.roots import SharedRoots
from ds_runtime.kv.tiers.slots import TierSlots
from ds_runtime.platform.page_copies import TorchPageCopies
from examples import examples

NAME = bytes(range(32))


def views(*parts):
    return [memoryview(bytearray(part)) for part in parts]


def named(number):
    return number.to_bytes(32, "big")


def data(folder):
    return [p for p in folder.glob("*/*") if p.suffix != ".tmp"]


CHANGE = st.tuples(st.sampled_from(["cut", "flip", "add", "zero"]), st.floats(0, 1))
parts = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5)


@given(parts=parts, change=CHANGE)
@settings(max_examples=examples(150), deadline=None)
def test_a_file_is_whole_or_ignored(tmp_path_factory, parts, change):
    """Cut anywhere, grown, or with any byte changed: it is gone, and may be written again."""
    folder = DiskFolder(tmp_path_factory.mktemp("disk"), 10**6)
    assert folder.write(NAME, "page", views(*parts)) == sum(map(len, parts))
    got = views(*(bytes(len(part)) for part in parts))
    assert folder.read(NAME, "page", got) and [bytes(p) for p in got] == parts
    (path,) = data(folder.folder)
    whole = path.read_bytes()
    (way, where) = change
    at = min(int(where * len(whole)), len(whole) - 1)
    if way == "cut":
        broken = whole[:at]
    elif way == "add":
        broken = whole + b"x"
    elif way == "flip":
        broken = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    else:  # as a machine may leave it that lost its power: of the right size, without its end
        broken = whole[:at] + bytes(len(whole) - at)
    path.write_bytes(broken)
    if broken != whole:
        assert not folder.read(NAME, "page", got)
        assert not folder.has(NAME, "page")
    again = sum(map(len, parts)) if broken != whole else 0
    assert folder.write(NAME, "page", views(*parts)) == again
    assert folder.read(NAME, "page", got)


def test_a_page_of_another_size_or_name_is_not_read(tmp_path):
    folder = DiskFolder(tmp_path / "cache", 10**6)
    folder.write(NAME, "page", views(b"abc"))
    (path,) = data(folder.folder)
    other = folder._path(named(7), "page")
    other.parent.mkdir(exist_ok=True)
    path.rename(other)
    assert not folder.read(named(7), "page", views(b"abc"))
    folder.write(NAME, "page", views(b"abc"))
    assert not folder.read(NAME, "state", views(b"abc"))
    assert not folder.read(NAME, "page", views(b"abcd"))


def test_only_its_owner_enters_the_folder(tmp_path):
    folder = DiskFolder(tmp_path / "a" / "cache", 10**6)
    folder.write(NAME, "page", views(b"abc"))
    assert folder.folder.stat().st_mode & 0o777 == 0o700
    (path,) = data(folder.folder)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "what users wrote" in (folder.folder / "README.txt").read_text()
    folder.folder.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 0700"):
        DiskFolder(folder.folder, 10**6)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--disk-cache .*file"):
        DiskFolder(tmp_path / "file", 10**6)


def test_its_size_counts_over_all_servers(tmp_path):
    """Two of them write in turn; those read last stay."""
    both = [DiskFolder(tmp_path / "cache", 20_000) for _ in range(2)]
    both[0].write(named(1000), "page", views(bytes(1000)))
    for number in range(60):
        one = both[number % 2]
        one._scanned = -1e9  # as after half a minute
        assert one.write(named(number), "page", views(bytes(1000))) == 1000
        os.utime(one._path(named(number), "page"), (number, number))
        assert one.read(named(1000), "page", views(bytes(1000)))
        held = sum(p.stat().st_size for p in data(one.folder))
        assert held <= 20_000
    kept = {n for n in range(60) if both[0].has(named(n), "page")}
    assert kept == set(range(60 - len(kept), 60)) and len(kept) > 10


def test_what_a_process_left_goes_in_time(tmp_path):
    folder = DiskFolder(tmp_path / "cache", 10**6)
    folder.write(NAME, "page", views(b"abc"))
    old, new = (data(folder.folder)[0].with_name(f".{n}.tmp") for n in "ab")
    old.write_bytes(b"x")
    new.write_bytes(b"y")
    os.utime(old, (1, 1))
    folder._scanned = -1e9
    folder.write(named(3), "page", views(b"abc"))
    assert not old.exists() and new.exists()


OTHERS = st.text("0123456789abcdef.-tmpgex", min_size=1, max_size=70).filter(
    lambda name: name.strip(".") and not name.endswith(".tmp")
)
KINDS = st.sampled_from(["file", "folder", "link", "fifo", "link to a folder"])


@given(others=st.lists(st.tuples(st.sampled_from(["", "00", "thesis"]), OTHERS, KINDS), max_size=6))
@example(others=[("", "ab", "link to a folder")])
@settings(max_examples=examples(80), deadline=None)
def test_what_is_not_its_own_stays_and_does_not_count(tmp_path_factory, others):
    """Files, folders, links and FIFOs, older than all pages, in a folder that is too full."""
    top = tmp_path_factory.mktemp("disk")
    outside = top / "outside"
    (outside / "inner").mkdir(parents=True)
    for path in (outside / "file", outside / "inner" / f"{'0' * 62}.page"):
        path.write_bytes(bytes(50_000))
        os.utime(path, (1, 1))
    folder = DiskFolder(top / "cache", 4000)
    for where, name, kind in others:
        place = folder.folder / where
        place.mkdir(exist_ok=True)
        if (path := place / name).exists() or name in ("00", "thesis", "README.txt"):
            continue
        if kind == "file":
            path.write_bytes(bytes(9000))
        elif kind == "folder":
            (path / "sub").mkdir(parents=True)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(outside / ("file" if kind == "link" else "inner"))
        os.utime(path, (1, 1), follow_symlinks=False)
    before = set(top.rglob("*"))
    for number in range(4):
        folder._scanned = -1e9
        assert folder.write(named(number), "page", views(bytes(1500))) == 1500, folder.stopped
    assert {p for p in before if not os.path.lexists(p)} == set()
    assert [folder.has(named(n), "page") for n in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_has_a_page_s_name_and_is_no_file_is_not_read(tmp_path, kind):
    """Nor waited for, as an open of a FIFO would."""
    folder = DiskFolder(tmp_path / "cache", 10**6)
    folder.write(NAME, "page", views(b"abc"))
    path = folder._path(NAME, "page")
    path.rename(tmp_path / "whole")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "whole")
    else:
        path.mkdir()
    assert not folder.has(NAME, "page")
    found = list[bool]()
    reader = threading.Thread(
        target=lambda: found.append(folder.read(NAME, "page", views(b"abc"))), daemon=True
    )
    reader.start()
    reader.join(10)
    assert found == [False]
    assert (tmp_path / "whole").exists()


@pytest.mark.parametrize("where", ["thesis", "ab"])
def test_a_sub_folder_that_cannot_be_read_is_left_out(tmp_path, monkeypatch, where):
    """It is another user's."""
    folder = DiskFolder(tmp_path / "cache", 4000)
    (closed := folder.folder / where).mkdir()
    (closed / "theirs").write_bytes(bytes(9000))
    scandir = os.scandir

    def refuses(path):
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuses)
    for number in range(4):
        folder._scanned = -1e9
        assert folder.write(named(number), "page", views(bytes(1500))) == 1500, folder.stopped
    assert (closed / "theirs").exists()


@pytest.mark.parametrize("link", [False, True])
def test_somebody_s_own_readme_stays(tmp_path, link):
    (place := tmp_path / "cache").mkdir(mode=0o700)
    own = tmp_path / "own" if link else place / "README.txt"
    own.write_text("mine")
    if link:
        (place / "README.txt").symlink_to(own)
    assert DiskFolder(place, 4000).write(NAME, "page", views(b"abc")) == 3
    assert own.read_text() == "mine"


def test_a_file_that_nobody_may_delete_stays_and_counts(tmp_path, monkeypatch):
    folder, unlink = DiskFolder(tmp_path / "cache", 4000), os.unlink
    folder.write(NAME, "page", views(bytes(1500)))
    (kept,) = data(folder.folder)
    os.utime(kept, (1, 1))

    def refuses(path, **more):
        if Path(path) == kept:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", refuses)
    for number in range(4):
        folder._scanned = -1e9
        assert folder.write(named(number), "page", views(bytes(1500))) == 1500, folder.stopped
        assert sum(p.stat().st_size for p in data(folder.folder)) <= 4000
    assert kept.exists()


@given(pids=st.sets(st.integers(1, 1 << 22), max_size=5), old=st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_temporary_names_that_others_left_stop_nothing(tmp_path_factory, pids, old):
    """In containers all servers have one pid: whose a name is, nobody knows. Old ones go."""
    folder = DiskFolder(tmp_path_factory.mktemp("disk"), 10**6)
    (folder.folder / "00").mkdir()
    left = list[Path]()
    for pid in {*pids, 1, os.getpid()}:
        left += [folder.folder / "00" / f".{pid}-{n}.tmp" for n in range(3)]
        left.append(folder.folder / f".{pid}-probe.tmp")
    for path in left:
        path.write_bytes(b"torn")
        if old:
            os.utime(path, (1, 1))
    assert folder.seconds(100) > 0
    assert folder.write(NAME, "page", views(b"abc")) == 3 and not folder.stopped
    assert folder.write(bytes(32), "page", views(b"abc")) == 3
    assert [path.exists() for path in left] == [not old] * len(left)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_a_disk_that_is_full_at_the_start_says_so_in_a_line(tmp_path, monkeypatch, capsys, code):
    """And is read. What else cannot be written to ends the start."""
    folder = DiskFolder(tmp_path / "cache", 10**6)
    folder.write(NAME, "page", views(b"abc"))

    def fails(path, parts):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("ds_runtime.kv.tiers.folder._write", fails)
    if code in (errno.EACCES, errno.EROFS):
        with pytest.raises(ConfigError, match=f"--disk-cache .*{os.strerror(code)}"):
            folder.seconds(100)
        return
    assert folder.seconds(100) == 0
    assert folder.read(NAME, "page", views(b"abc"))
    disk = Disk(folder, DiskHand(folder, HostBytes(4)))
    disk.poll()
    disk.poll()
    disk.close()
    assert capsys.readouterr().err.splitlines() == [
        f"warning: --disk-cache {folder.folder}: {os.strerror(code)}: no more pages are written "
        "there"
    ]


WRITER = """
    import sys
    from pathlib import Path
    from ds_runtime.kv.tiers.folder import DiskFolder

    folder, number = DiskFolder(Path(sys.argv[1]), 10**9), int(sys.argv[2])
    print("begun", flush=True)
    while True:
        name = number.to_bytes(32, "big")
        folder.write(name, "page", [memoryview(bytes([number % 251]) * 300_000)] * 4)
        number += 3
"""


def start(source, *args):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_that_are_killed_while_they_write_leave_whole_pages(tmp_path):
    folder = DiskFolder(tmp_path / "cache", 10**9)
    for turn in range(4):
        writers = [start(WRITER, folder.folder, turn * 1000 + n) for n in range(3)]
        for writer in writers:
            assert writer.stdout.readline() == "begun\n"
        time.sleep(0.05 + 0.03 * turn)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.communicate()
    read = 0
    for number in range(4000):
        if folder.has(named(number), "page"):
            got = [memoryview(bytearray(300_000)) for _ in range(4)]
            assert folder.read(named(number), "page", got), "a file with a name is whole"
            assert all(bytes(part) == bytes([number % 251]) * 300_000 for part in got)
            read += 1
    assert read >= 12


FULL = """
    import resource, signal, sys
    from pathlib import Path
    from ds_runtime.kv.tiers.folder import DiskFolder

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    folder = DiskFolder(Path(sys.argv[1]), 10**9)
    small, large = [memoryview(bytes(1000))], [memoryview(bytes(50_000))]
    print(folder.write(bytes(32), "page", small))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    print(folder.write(b"a" * 32, "page", large), folder.stopped)
    got = [memoryview(bytearray(1000))]
    print(folder.write(b"b" * 32, "page", small), folder.read(bytes(32), "page", got))
"""


def test_a_disk_that_is_full_is_only_read(tmp_path):
    done = start(FULL, tmp_path / "cache")
    out, _ = done.communicate(timeout=60)
    first, full, then = out.splitlines()
    assert first == "1000" and then == "0 True"
    assert full.startswith("0 ") and "no more pages are written there" in full
    assert len(data(tmp_path / "cache")) == 1 and not list((tmp_path / "cache").glob("*/*.tmp"))


class HostBytes:
    """SlotMemory, without copies."""

    queued = 0

    def __init__(self, count):
        self.slots = [bytearray(100) for _ in range(count)]

    def parts(self, kind, slot):
        return [memoryview(self.slots[slot])]

    def ended(self, finish):
        return 0


@pytest.mark.parametrize("reads", [1, 4, 20])
def test_a_disk_closes_while_it_reads(tmp_path, reads):
    """Reads that run, and those that have not begun: nobody waits for either."""
    folder = DiskFolder(tmp_path / "cache", 10**6)
    for number in range(reads):
        folder.write(named(number), "page", views(bytes(100)))
    disk = Disk(folder, DiskHand(folder, HostBytes(30)))
    slots, read = TierSlots(30), folder.read

    def slow(*given):
        time.sleep(0.1)
        return read(*given)

    folder.read = slow
    for number in range(reads):
        wanted = [(slots, "page", named(number), partial(slots.adopt, named(number)))]
        disk.fetch([], lambda _, wanted=wanted: wanted)
    disk.close()
    slots.check()
    assert not disk.lags and not slots._reserved


@pytest.mark.parametrize("hangs", [0, 2, 5])
def test_closing_waits_for_a_disk_that_hangs_so_long_and_says_what_was_left(
    tmp_path, monkeypatch, capsys, hangs
):
    """Writes from number `hangs` on do not come back before the test lets them."""
    monkeypatch.setattr("ds_runtime.kv.tiers.disks.PATIENCE", 0.5)
    folder, slots = DiskFolder(tmp_path / "cache", 10**6), TierSlots(40)
    writes = Hangs(folder, "write", lambda number: number > hangs)
    disk = Disk(folder, DiskHand(folder, HostBytes(40)))
    for number in range(20):  # a quarter of the slots may be on its way at a time
        disk.save(slots, "page", slots.take(named(number)), named(number))
    begin = time.monotonic()
    try:
        Disks([disk]).close(settle=lambda: False, unsettled=lambda: 0)
        took = time.monotonic() - begin
    finally:
        writes.release.set()
    assert 0.4 < took < 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --disk-cache {folder.folder}: {20 - hangs} pages were not")
    disk._hands._writer.close()
    assert len(writes.begun) == hangs + 1, "what had not begun is left out"


@pytest.mark.parametrize("hung", [1, 4, 20])
@pytest.mark.parametrize("follows", [False, True])
def test_closing_leaves_reads_that_hang(tmp_path, hung, follows):
    """Rank 0 and others alike: those that have not begun never do."""
    folder, slots = DiskFolder(tmp_path / "cache", 10**6), TierSlots(30)
    for number in range(hung):
        folder.write(named(number), "page", views(bytes(100)))
    reads = Hangs(folder, "read")
    hand = DiskHand(folder, HostBytes(30))
    disk, follower = Disk(folder, hand), DiskFollower(hand, 0)
    for number in range(hung):
        if follows:
            follower.take(DiskJob(number=number, group=0, way="read", kinds=["page"], name=NAME))
        else:
            wanted = [(slots, "page", named(number), partial(slots.adopt, named(number)))]
            disk.fetch([], lambda _, wanted=wanted: wanted)
    begin = time.monotonic()
    while len(reads.begun) < min(hung, 4):
        assert time.monotonic() < begin + 20
        disk.poll(seconds=0.01)
    begin = time.monotonic()
    try:
        (follower if follows else disk).close()
        took = time.monotonic() - begin
        assert len(slots._reserved) == (0 if follows else min(hung, 4)), "threads fill these yet"
    finally:
        reads.release.set()
    assert took < 5
    hand._readers.close()
    disk.poll()
    slots.check()
    assert not disk.lags and not slots._reserved and len(reads.begun) == min(hung, 4)


@given(
    prompts=st.lists(st.integers(0, 3), min_size=2, max_size=5),
    way=st.sampled_from(["has", "read"]),
    hung=st.integers(1, 4),
)
@settings(max_examples=examples(12), deadline=None)
def test_one_prompt_waits_for_a_disk_that_hangs_and_no_other(tmp_path_factory, prompts, way, hung):
    """All prompts of that time do, and none that comes later, until it has answered: what is there,
    or what is in a file."""
    top, known = tmp_path_factory.mktemp("d") / "cache", {}
    first, disk = engine(top, known)
    for number in range(4):
        asked(first, str(number), [number, *LONG], max_tokens=4)
    disk.close()
    rig, disk = engine(top, known)
    answers = Hangs(disk.folder, way, lambda number: number <= hung)
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_runtime.kv.tiers.disk.LONGEST", 0.3)
        below, waits = rig.ranks[0].below, list[bool]()
        fetch = below.fetch

        def fetched(*given):
            waits.append(not (made := fetch(*given)).done)
            return made

        below.fetch = fetched
        try:
            for turn, number in enumerate(prompts):
                asked(rig, str(turn), [number, *LONG, turn], max_tokens=1)
        finally:
            answers.release.set()
        assert waits[0] and not any(waits[1:]) and len(waits) >= len(prompts)
    assert time.monotonic() < begin + 30, "a step has waited for the disk"
    below.fetch = fetch
    while disk.lags:
        disk.poll(idle=True, seconds=0.1)
    before = disk.num_read
    assert asked(rig, "again", [3, *LONG, 30], max_tokens=1) > 0
    assert 3 in prompts or disk.num_read > before
    disk.close()


HANGS = """
    import sys, time
    from pathlib import Path
    from ds_runtime.kv.tiers.folder import DiskFolder
    from ds_runtime.kv.tiers.hand import DiskHand

    class Memory:
        queued = 0
        def parts(self, kind, slot): return [memoryview(bytearray(100))]
        def ended(self, finish): return 0

    folder, way = DiskFolder(Path(sys.argv[1]), 10**6), sys.argv[2]
    setattr(folder, way, lambda *given: time.sleep(600))
    hand = DiskHand(folder, Memory())
    for number in range(6):
        getattr(hand, way)("page", number, bytes([number]) * 32)
    if sys.argv[3] == "closes":
        hand.close(leaves=True)
    print("end", flush=True)
"""


@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize("closes", ["closes", "leaves"])
def test_a_process_ends_while_its_files_hang(tmp_path, way, closes):
    done = start(HANGS, tmp_path / "cache", way, closes)
    try:
        out, _ = done.communicate(timeout=30)
    finally:
        done.kill()
    assert out == "end\n" and done.returncode == 0


@given(host=st.integers(1, 60), pages=st.integers(0, 12), states=st.integers(0, 12))
@settings(max_examples=examples(60), deadline=None)
def test_no_more_settles_than_may_be_on_its_way(tmp_path_factory, host, pages, states):
    """Pages and states on their way count alike, so that these may be more than a share of the
    slots of either; what stays is for the next time."""
    rig, disk = engine(tmp_path_factory.mktemp("d") / "cache", {}, BACK, host=host)
    below = rig.ranks[0].below
    asked(rig, "a", LONG, max_tokens=1)
    assert (before := [*below._only_here]), "nothing waits to settle"
    for kind, count in (("page", pages), ("state", states)):
        disk._noted += [_Writing(below.pages, kind, 0, NAME)] * count
    most = max(1, host // 4) - pages - states
    count = below.settle()
    assert count == len(before) - len(below._only_here) == min(-(-max(0, most) // 2), len(before))
    disk._noted.clear()
    disk.close()


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("kinds", [["page"], ["state"], ["page", "state"]])
def test_what_is_forgotten_nobody_reads_from_then_on(tmp_path, part, kinds):
    """Neither this process nor another, however far the writing thread is behind; and what was
    being written is not there later."""
    both = [DiskFolder(tmp_path / "cache", 10**6) for _ in range(2)]
    hand = DiskHand(both[0], HostBytes(1), part=part)
    own, left = hand._own(NAME), {"page", "state"} - {*kinds}
    for kind in ("page", "state"):
        hand.write(kind, 0, NAME).result(10)
        assert both[1].has(own, kind)
    goes_on = threading.Event()
    behind = hand._writer.submit(lambda: goes_on.wait(20))
    written = [hand.write(kind, 0, named(5)) for kind in ("page", "state")]
    again = hand._own(named(5))
    hand.forget(NAME, kinds)
    hand.forget(named(5), kinds)
    for kind in kinds:
        assert not any(one.has(own, kind) for one in both)
        assert not both[1].read(own, kind, views(bytes(100)))
        assert hand.read(kind, 0, NAME).result(10) == LOST
    assert not behind.done(), "nobody has waited for the thread that writes"
    goes_on.set()
    assert [one.result(10) for one in written] == [100, 100]
    hand.close()
    for name in (own, again):
        assert {kind for kind in ("page", "state") if both[1].has(name, kind)} == left


@given(kinds=st.sets(st.sampled_from(["page", "state"]), min_size=1))
@settings(max_examples=examples(3), deadline=None)
def test_a_disk_that_deletes_nothing_holds_no_step_up(tmp_path_factory, kinds):
    """And what is to be deleted is not read, though it is there."""
    folder = DiskFolder(tmp_path_factory.mktemp("d") / "cache", 10**6)
    hand = DiskHand(folder, HostBytes(1))
    for kind in ("page", "state"):
        hand.write(kind, 0, NAME).result(10)

    forgets, begin = Hangs(folder, "forget"), time.monotonic()
    hand.forget(NAME, kinds)
    try:
        assert time.monotonic() < begin + 20
        for kind in ("page", "state"):
            assert folder.has(NAME, kind)
            assert hand.read(kind, 0, NAME).result(10) == (LOST if kind in kinds else 100)
    finally:
        forgets.release.set()
    hand.close()
    assert {kind for kind in ("page", "state") if folder.has(NAME, kind)} == {
        "page",
        "state",
    } - kinds


class Remembered(dict):
    """The fake device's host memory by names of pages, as it outlives a device."""

    def __init__(self, rig, known):
        self.rig, self.known = rig, known

    def name(self, place):
        names = self.rig.ranks[place[0]].below.pages._names.items()
        return next(name for name, slot in names if slot == place[1])

    def __setitem__(self, place, tokens):
        self.known[self.name(place)] = tokens

    def __getitem__(self, place):
        return self.known[self.name(place)]


class Late:
    """Copies that nobody sees the end of before others are queued behind them."""

    def __init__(self, copying, number, made):
        self.copying, self.number, self.made = copying, number, made

    def ended(self, layer):
        return self.made.count > self.number

    def wait(self, layer):
        self.copying.wait(layer)

    def finish(self):
        self.number = -1


class LateCopies(TorchPageCopies):
    """A device that is always one behind."""

    count = 0

    def _copy(self, layers, one):
        self.count += 1
        return Late(super()._copy(layers, one), self.count, self)


def engine(folder, known, policy="write_through", pages=20, host=60, idle=True):
    """idle: what is copied is waited for in front of every step."""
    rig = toy(pages, 4, snapshots=4, host=host, write=policy, make=ToyDevice)
    rig.device.host = Remembered(rig, known)
    below = rig.ranks[0].below
    files = DiskFolder(folder, 10**8)
    below.disk = Disk(files, DiskHand(files, rig.device.below[0]))
    schedule = rig.scheduler.schedule

    def scheduled():
        below.disk.poll(idle=idle)
        plan = schedule()
        while plan is None and below.disk.busy:
            below.disk.poll(seconds=0.1)
            plan = schedule()
        return plan

    rig.scheduler.schedule = scheduled
    return rig, below.disk


def test_pages_and_states_outlive_the_engine(tmp_path):
    known, said = {}, {}
    first, disk = engine(tmp_path / "cache", known)
    for number in range(6):
        assert asked(first, str(number), [number, *LONG], max_tokens=12) == 0
        said[number] = [number, *LONG, *first.answers[str(number)].tokens]
    disk.close()
    assert disk.bytes_written > 0
    second, disk = engine(tmp_path / "cache", known)
    found = [asked(second, str(n), [*said[n], 5], max_tokens=4) for n in range(6)]
    assert min(found) >= 36 and disk.num_read >= 54
    disk.close()


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=2, max_size=9),
    restarts=st.sets(st.integers(1, 8), max_size=3),
    torn=st.integers(0, 3),
    policy=st.sampled_from(POLICIES),
    pages=st.integers(14, 24),
    host=st.integers(4, 60),
)
@settings(max_examples=examples(20), deadline=None)
def test_sessions_go_on_exactly_over_restarts(
    tmp_path_factory, prompts, restarts, torn, policy, pages, host
):
    folder, known = tmp_path_factory.mktemp("d") / "cache", {}
    rig, disk = engine(folder, known, policy, pages, host)
    for turn, (session, length) in enumerate(prompts):
        if turn in restarts:
            disk.close()
            for path in sorted(data(folder))[:torn]:
                path.write_bytes(path.read_bytes()[:-3])
            rig, disk = engine(folder, known, policy, pages, host)
        asked(rig, str(turn), [session, *LONG][:length], max_tokens=6)
        rig.ranks[0].below.check()
    disk.close()
    rig.ranks[0].below.check()


@pytest.mark.parametrize(
    ("loaded", "read", "host", "storage"),
    [(1, 1, True, True), (1, 9, True, False), (9, 9, False, False)],
)
def test_only_what_beats_computing_is_brought(tmp_path, loaded, read, host, storage):
    known = {}
    first, disk = engine(tmp_path / "cache", known)
    asked(first, "a", LONG)
    disk.close()
    rig, disk = engine(tmp_path / "cache", known)
    rig.ranks[0].below.pace = BringPace(computed=5.0, loaded=loaded, read=read)
    assert asked(rig, "a", LONG) == (36 if storage else 0)
    for number in range(9):
        asked(rig, f"other {number}", [number, *range(20, 37)], max_tokens=1)
    loads = len(rig.plans)
    assert asked(rig, "again", LONG) == (36 if host else 0)
    assert any(p.loads for p in rig.plans[loads:]) == host
    said = rig.ranks[0].below.pace.said
    assert ["nothing" in line for line in said] == [not host, not storage]
    disk.close()


def test_the_disk_s_speed_is_measured(tmp_path):
    folder = DiskFolder(tmp_path / "cache", 10**6)
    one = folder.seconds(1 << 20)
    assert 0 < one < 10 and not list(folder.folder.glob(".*"))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_that_broke_is_on_disk_then_or_later(tmp_path, monkeypatch, policy, late):
    """No page that was computed, no state that was read: written before, on its way, or saved only
    once others need the room."""
    if late:
        monkeypatch.setattr("toy_model.TorchPageCopies", LateCopies)
    rig, disk = engine(tmp_path / "cache", {}, policy, pages=32, host=200, idle=not late)
    for rid in "ab":
        asked(rig, rid, LONG, max_tokens=1)
    rig.submit("c", [*LONG, 3, 4, 5], max_tokens=20)
    while len(rig.answers["c"].tokens) < 12:
        rig.step()
    request = next(r for r in rig.scheduler.running if r.rid == "c")
    broken = [*page_keys(own_root(OWN), request.tokens(0, request.total_len), 4)]
    known = request.cached_tokens // 4
    assert 0 < known < len(broken)
    rig.scheduler._break(request, 45)
    rig.run()
    del rig.answers["c"], rig.submits["c"]
    for number in range(12):
        asked(rig, f"other {number}", [30 + number % 9, *range(20, 38)], max_tokens=1)
    disk.close()
    folder = disk.folder
    assert [i for i, name in enumerate(broken) if folder.has(name, "state")] == []
    assert [i for i, name in enumerate(broken) if folder.has(name, "page") and i >= known] == []
    assert policy == "write_through_selective" or len(data(folder.folder)) > 0


def test_a_device_that_is_always_behind_has_its_pages_written(tmp_path, monkeypatch):
    """Every step saves some, so the copies never all have ended."""
    monkeypatch.setattr("toy_model.TorchPageCopies", LateCopies)
    rig, disk = engine(tmp_path / "cache", {}, pages=60, host=200, idle=False)
    for number in range(40):
        rig.submit(str(number), [number % 40, number // 40, *LONG[:20]], max_tokens=30)
        for _ in range(4):
            rig.step()
    memory = rig.device.below[0]
    assert rig.scheduler.has_work and memory.ended(False) < memory.queued
    assert disk.bytes_written > 0 and data(disk.folder.folder)
    rig.run()
    disk.close()


def test_an_adapter_whose_files_are_gone_has_a_root_of_its_own(monkeypatch, tmp_path):
    """That no other process, adapter, or later load has; a digest is read once."""
    asked_for = []

    def digest(folder, stamps):
        asked_for.append(folder)
        if folder.name.startswith("gone"):
            raise CheckpointError("gone")
        return folder.name

    monkeypatch.setattr("ds_runtime.kv.tiers.roots.weights_digest", digest)
    origin = Origin("sha", (("kv", "latent_pages.v1"),), ("bfloat16",), 16)
    names = [None, *(tmp_path / name for name in ("gone", "gone too", "here", "here"))]
    files = {number: name and (name, {}) for number, name in enumerate(names, 1)}
    one, other = (SharedRoots(origin, files.__getitem__) for _ in range(2))
    realms = [Realm(key, salt) for key in (0, *files) for salt in ("", "a")]
    first, again, there = ([roots(r) for r in realms] for roots in (one, one, other))
    assert first == again and len(asked_for) == 8
    assert len({*first}) == len(first) - 2, "but for an adapter that is loaded twice"
    alike = [a == b for a, b in zip(first, there, strict=True)]
    assert alike == [True] * 2 + [False] * 6 + [True] * 4
    assert not {own_root(realm) for realm in realms} & {*first, *there}
