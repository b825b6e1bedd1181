"""Pages on disk: read back as they were written or not at all, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import ToyDevice, toy

from ds_runtime.errors import ConfigError
from ds_runtime.kv.tiers.disk import Disk
from ds_runtime.kv.tiers.folder import DiskFolder
from ds_runtime.kv.tiers.host import POLICIES
from ds_runtime.kv.tiers.pace import BringPace
from examples import examples

NAME = bytes(range(32))
LONG = list(range(1, 38))


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


def engine(folder, known, policy="write_through", pages=20, host=60):
    rig = toy(pages, 4, snapshots=4, host=host, write=policy, make=ToyDevice)
    rig.device.host = Remembered(rig, known)
    below = rig.ranks[0].below
    below.disk = Disk(DiskFolder(folder, 10**8), rig.device.below[0])
    schedule = rig.scheduler.schedule

    def scheduled():
        below.disk.poll(idle=True)
        plan = schedule()
        while plan is None and below.disk.busy:
            below.disk.poll(seconds=0.1)
            plan = schedule()
        return plan

    rig.scheduler.schedule = scheduled
    return rig, below.disk


def asked(rig, rid, prompt, **params):
    rig.submit(rid, list(prompt), **params)
    rig.run()
    rig.check_end()
    return rig.cached[rid]


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
