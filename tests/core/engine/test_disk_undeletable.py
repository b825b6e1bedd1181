"""Pages that must not be read any more, and that nobody may delete: of a folder that is read-only,
of files and folders of another user. Real permissions, of a process that is not root.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_disk_tier import NAME, HostBytes, named, views

from ds_runtime.kv.tiers.disk import Disk
from ds_runtime.kv.tiers.folder import DiskFolder, Sought
from ds_runtime.kv.tiers.hand import LOST, DiskHand
from examples import examples

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
CONTENT = bytes(range(100))


@pytest.fixture
def cache() -> Iterator[Path]:
    """Where an unprivileged user may have a folder: those of pytest are root's alone."""
    outer = Path(tempfile.mkdtemp())
    if IS_ROOT:
        os.chown(outer, NOBODY, NOBODY)
    try:
        yield outer / "cache"
    finally:
        for folder, _, _ in os.walk(outer):
            os.chmod(folder, 0o700)
        shutil.rmtree(outer)


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user whom permissions bind."""
    if not IS_ROOT:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def is_read(folder: DiskFolder, name: bytes = NAME) -> bool:
    return folder.read(name, "page", views(bytes(len(CONTENT))))


def lock(cache: Path, how: str) -> None:
    """Nobody may delete the page. The others of these let nobody change it, either."""
    (path,) = cache.glob("??/*.page")
    if how == "read-only and its file":
        path.chmod(0o400)
    if how == "of another user":
        os.chown(path, 0, 0)
        path.chmod(0o644)
        os.chown(path.parent, 0, 0)
        path.parent.chmod(0o755)
    else:
        path.parent.chmod(0o500)


LOCKED = ["read-only", "read-only and its file"]
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root gives files to others")


@pytest.mark.parametrize("how", [*LOCKED, pytest.param("of another user", marks=needs_root)])
@pytest.mark.parametrize("way", ["folder", "disk"])
def test_a_page_that_nobody_may_delete_is_not_read_again(cache: Path, how: str, way: str) -> None:
    with unprivileged():
        folder = DiskFolder(cache, 10**6)
        assert folder.write(NAME, "page", views(CONTENT)) and is_read(folder)
    lock(cache, how)
    (path,) = cache.glob("??/*.page")
    with unprivileged():
        if way == "disk":
            hand = DiskHand(folder, HostBytes(8))
            disk = Disk(folder, hand)
            disk.forget(NAME, "page")
            assert hand.read("page", 0, NAME).result(20) == LOST
            disk.close()
        else:
            folder.forget(NAME, "page")
        assert path.exists(), "nobody could delete it"
        assert not folder.has(NAME, "page") and not is_read(folder)
        assert folder.reach([Sought(NAME, False, True)]) == 0
        later = DiskFolder(cache, 10**6)
        if how == "read-only":  # it is empty: to every server, and after every restart
            assert not folder.stopped and path.stat().st_size == 0
            assert not later.has(NAME, "page") and not is_read(later)
        else:  # the user is told what to do
            said = f"{path} must not be read any more, and cannot be deleted (Permission denied)"
            assert said in folder.stopped and "delete it" in folder.stopped
            assert not folder.write(named(3), "page", views(CONTENT))


@pytest.mark.parametrize("how", LOCKED)
def test_once_it_can_be_deleted_the_page_is_written_anew(cache: Path, how: str) -> None:
    with unprivileged():
        folder = DiskFolder(cache, 10**6)
        folder.write(NAME, "page", views(CONTENT))
        lock(cache, how)
        folder.forget(NAME, "page")
        (path,) = cache.glob("??/*.page")
        path.parent.chmod(0o700)
        folder.stopped = ""  # as a server that goes on
        assert not folder.has(NAME, "page")
        assert folder.write(NAME, "page", views(CONTENT)) == len(CONTENT)
        assert folder.has(NAME, "page") and is_read(folder) and is_read(DiskFolder(cache, 10**6))


def test_a_page_to_delete_is_told_also_once_writing_has_stopped(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else was wrong with the disk."""
    with unprivileged():
        folder = DiskFolder(cache, 10**6)
        assert folder.write(NAME, "page", views(CONTENT))
        disk = Disk(folder, DiskHand(folder, HostBytes(8)))
        folder.stop(OSError(28, "No space left on device"))
        disk.poll()
        disk.poll()
        (told,) = capsys.readouterr().err.splitlines()
        assert "No space left on device" in told
    lock(cache, "read-only and its file")
    (path,) = cache.glob("??/*.page")
    with unprivileged():
        disk.forget(NAME, "page")
        disk.close()
        disk.poll()
        disk.poll()
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("warning: --disk-cache ")
    assert f"{path} must not be read any more, and cannot be deleted" in told


@pytest.mark.parametrize("gone", ["before it is looked at", "before it is opened"])
def test_a_page_that_another_server_deletes_meanwhile_stops_nothing(
    cache: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DiskFolder(cache, 10**6)
    assert folder.write(NAME, "page", views(CONTENT))
    (path,) = cache.glob("??/*.page")
    unlink, stat = Path.unlink, os.stat

    def refuse(one: Path, missing_ok: bool = False) -> None:
        if gone == "before it is looked at":
            unlink(one)
        raise PermissionError(13, "Permission denied")

    def look(one: Path, **how: bool) -> os.stat_result:
        found = stat(one, **how)
        unlink(path, missing_ok=True)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        if gone == "before it is opened":
            patched.setattr(os, "stat", look)
        folder.forget(NAME, "page")
    assert not path.exists() and not folder.stopped
    assert folder.write(NAME, "page", views(CONTENT)) and is_read(folder)


SERVER = """
    import json, os, sys
    from pathlib import Path
    from ds_runtime.kv.tiers.disk import Disk
    from ds_runtime.kv.tiers.folder import DiskFolder, Sought
    from ds_runtime.kv.tiers.hand import LOST, DiskHand

    class Memory:
        queued, slot = 0, bytearray(100)

        def parts(self, kind, slot):
            return [memoryview(self.slot)]

        def ended(self, finish):
            return 0

    if os.geteuid() == 0:
        os.setuid(65534)
    NAME, content, memory = bytes(range(32)), bytes.fromhex(sys.argv[2]), Memory()
    folder = DiskFolder(Path(sys.argv[1]), 10**6)
    disk = Disk(folder, DiskHand(folder, memory))
    disk.poll()
    found = folder.has(NAME, "page"), folder.reach([Sought(NAME, False, True)])
    read = disk._hands.read("page", 0, NAME).result(20) != LOST
    assert not read or bytes(memory.slot) == content
    if sys.argv[3] == "forgets":
        disk.forget(NAME, "page")
    wrote = folder.write(NAME, "page", [memoryview(content)])
    disk.close()
    disk.poll()
    print(json.dumps([*found, read, wrote]))
"""


def served(cache: Path, does: str = "reads") -> tuple[list[int], list[str]]:
    """What another process has of the page: [is it there, how many can be had, is it read, bytes
    that it writes anew], and the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SERVER), cache, CONTENT.hex(), does],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.splitlines()


def damage(path: Path, how: str) -> None:
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("how", [LOCKED[1], pytest.param("of another user", marks=needs_root)])
@pytest.mark.parametrize("why", ["forgets", "damaged", "cut", "closed"])
def test_processes_refuse_the_same_page_after_each_restart(cache: Path, why: str, how: str) -> None:
    """With one line each, and nobody looks for it. Once it can be deleted, the next one writes it
    anew, and the one after that reads it."""
    with unprivileged():
        DiskFolder(cache, 10**6).write(NAME, "page", views(CONTENT))
    (path,) = cache.glob("??/*.page")
    damage(path, why)
    lock(cache, how)
    if why == "closed":
        path.chmod(0)
    known, said = served(cache, why)
    own = how == LOCKED[1]  # who reads a file marks it as used
    assert known == [True, 1, own and why == "forgets", 0], "nobody knew"
    (told,) = said
    assert f"{path} must not be read any more, and cannot be deleted" in told
    for _ in range(2):
        known, again = served(cache)
        assert known == [False, 0, False, 0]
        assert again == [told]
    if IS_ROOT:
        os.chown(path.parent, NOBODY, NOBODY)
    path.parent.chmod(0o700)
    assert served(cache) == ([False, 0, False, len(CONTENT)], [])
    assert served(cache) == ([True, 1, True, 0], [])


def test_a_line_names_one_of_many(cache: Path) -> None:
    with unprivileged():
        folder = DiskFolder(cache, 10**6)
        for number in range(5):
            folder.write(named(number), "page", views(CONTENT))
    (inner,) = cache.glob("??")
    for path in inner.iterdir():
        path.chmod(0o400)
    inner.chmod(0o500)
    with unprivileged():
        for number in range(4):
            folder.forget(named(number), "page")
        later = DiskFolder(cache, 10**6)
        first = inner / f"{named(0).hex()[2:]}.page"
        assert later.stopped.startswith(f"{cache}: {first} and 3 more, listed in {cache}/refused,")
        assert [later.has(named(n), "page") for n in range(5)] == [False] * 4 + [True]
        assert is_read(later, named(4)) and not later.write(named(9), "page", views(CONTENT))


@pytest.mark.parametrize("own", ["x.page", "0" * 63 + ".page", "a folder", "0" * 64 + ".tmp"])
def test_what_is_no_note_says_nothing(cache: Path, own: str) -> None:
    with unprivileged():
        DiskFolder(cache, 10**6).write(NAME, "page", views(CONTENT))
        (cache / "refused" / own).mkdir(parents=True)
        folder = DiskFolder(cache, 10**6)
        assert not folder.stopped and is_read(folder) and (cache / "refused" / own).is_dir()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "forget", "damage", "lock", "close", "free", "restart"]),
        st.integers(0, 1),
    ),
    max_size=14,
)


def change(inner: Path, do: str, path: Path) -> None:
    """By somebody else, of whose folder this is one; path: the page of which it is done."""
    if do == "damage" and path.exists() and (size := path.stat().st_size):
        mode = path.stat().st_mode
        path.chmod(0o600)
        path.write_bytes(bytes(size))
        path.chmod(mode)
    if do == "close" and path.exists():
        path.chmod(0)
    if do == "lock":
        for one in inner.iterdir():
            one.chmod(one.stat().st_mode & 0o400)
        inner.chmod(0o500)
    if do == "free":
        inner.chmod(0o700)


@given(steps=STEPS)
@settings(max_examples=examples(60), deadline=None)
def test_what_is_forgotten_is_never_read_until_it_is_written_again(steps) -> None:
    """Whatever becomes of the folder's permissions meanwhile, by this server and by others, which
    start later."""
    outer = Path(tempfile.mkdtemp())
    if IS_ROOT:
        os.chown(outer, NOBODY, NOBODY)
    try:
        with unprivileged():
            folder, kept = DiskFolder(outer / "cache", 10**6), set[int]()
            for do, number in steps:
                if do == "write":
                    if folder.write(named(number), "page", views(CONTENT)):
                        kept.add(number)
                elif do == "forget":
                    folder.forget(named(number), "page")
                    kept.discard(number)
                elif do == "restart":
                    folder = DiskFolder(outer / "cache", 10**6)
                elif (inner := outer / "cache" / "00").exists():
                    change(inner, do, inner / f"{named(number).hex()[2:]}.page")
                    if do in ("damage", "close"):
                        kept.discard(number)
                for number in range(4):
                    right = number in kept
                    assert is_read(folder, named(number)) is right
                    assert folder.has(named(number), "page") is right
                    later = DiskFolder(outer / "cache", 10**6)
                    assert later.has(named(number), "page") is right
                    assert is_read(later, named(number)) is right
    finally:
        for inner in (outer / "cache").glob("??"):
            inner.chmod(0o700)
        shutil.rmtree(outer)


@contextmanager
def full() -> Iterator[None]:
    """A disk that takes empty files alone, as one does whose blocks are all in use."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "mkdir", refuse)
        patched.setattr(os, "writev", refuse)
        patched.setattr(os, "write", refuse)
        yield


@pytest.mark.parametrize("started", ["with room", "full"])
def test_a_page_that_is_refused_on_a_full_disk_stays_refused(cache: Path, started: str) -> None:
    """After restarts, too; where the disk was full at the first start already, the user is told
    that it does not."""
    with unprivileged():
        folder = DiskFolder(cache, 10**6)
        assert folder.write(NAME, "page", views(CONTENT))
        if started == "full":  # one that an older version has made
            (cache / "refused").rmdir()
    lock(cache, "read-only and its file")
    (path,) = cache.glob("??/*.page")
    note = cache / "refused" / f"{path.parent.name}{path.name}"
    with unprivileged(), full():
        if started == "full":
            folder = DiskFolder(cache, 10**6)
        assert folder.seconds(1) == 0 and "No space left" in folder.stopped
        folder.forget(NAME, "page")
        assert not folder.has(NAME, "page") and not is_read(folder)
        assert f"{path} must not be read any more, and cannot be deleted" in folder.stopped
        missing = folder.stopped.partition("(Permission denied), ")[2]
        for _ in range(2):
            later = DiskFolder(cache, 10**6)
            if started == "with room":
                assert not missing and note.exists() and note.stat().st_size == 0
                assert not later.has(NAME, "page") and not is_read(later) and later.stopped
            else:
                assert missing.startswith(f"nor noted in {note} (No space left on device), so a")
                assert ": delete it" in missing
                assert is_read(later), "as it was told"
