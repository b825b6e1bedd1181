"""Pages on disk: one file each, under its name, in a folder that servers may share.

What the bytes of a page depend on is all in its name (`kv.keys`), so a file means the same to every
server and after every restart. A file is written under another name first, so a process that dies
leaves none that is torn; what a machine leaves that dies is told by its checksum. Nothing waits for
the disk: what is lost is computed again.

A file that must not be read is deleted. Where nobody may delete or empty it, an empty file of its
name in the folder `refused` says so to every server and after every restart. That folder is made
at the start: a disk that fills up later still takes an empty file, and no folder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from ds_runtime.common.progress import amount
from ds_runtime.errors import ConfigError, unwritable
from ds_runtime.kv.tiers.pace import PROBED

VERSION = 1
_MAGIC = b"ds-kv\n"
_HEAD = Struct("<6sHI32sQ")  # magic, version, checksum of the bytes, name, how many bytes
_TORN = 3600.0  # seconds after which nobody still writes a file under its first name
_SCAN = 30.0  # seconds that a count of the folder is trusted, beside what was written here
_LEFT = 0.9  # of the size, once the oldest have left
_FOLDER = re.compile("[0-9a-f]{2}")
_NOTES = "refused"  # the folder of notes
_NOTED = re.compile(r"([0-9a-f]{2})([0-9a-f]{62}\.(?:page|state))")
_UNREADABLE = {errno.EIO, errno.EACCES, errno.EPERM}  # errors that do not go by themselves
_TEMPORARY = re.compile(r"\.[\w-]+\.tmp")
_OURS = re.compile(r"[0-9a-f]{62}\.(page|state)|" + _TEMPORARY.pattern)  # others' files stay
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NOTE = """These files hold what users wrote and were answered, as a language model remembers it.
Whoever reads them can find out much of it. They may be deleted at any time.
"""


class Sought(NamedTuple):
    """A page that a prompt has, in the order of the prompt. page, state: whether it is known
    already that it can be had, and that a request can continue after it."""

    name: bytes
    page: bool
    state: bool


class DiskFolder:
    """size: bytes of all files, whoever wrote them. Raises ConfigError for a folder that others may
    read, or that cannot be written to."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.stopped = ""  # why nothing is written any more
        self._held, self._scanned = 0, -_SCAN
        self._refused = set[Path]()  # what is never to be read, and may still be there
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise ConfigError(
                    f"--disk-cache {folder}: others may enter it, and it will hold what users "
                    "wrote: make it your own with mode 0700"
                )
            with suppress(OSError), (folder / "README.txt").open("x") as note:
                note.write(_NOTE)  # a full disk can still be read; somebody's own stays
            with suppress(OSError):  # a disk that is full already can still be read
                (folder / _NOTES).mkdir(mode=0o700, exist_ok=True)
            noted = self._read_notes()
        except OSError as e:
            raise unwritable(f"--disk-cache {folder}", e, "a folder on a local disk") from e
        for path in noted:
            with suppress(OSError):
                self._erase(path)
        if self._refused:
            self._refuse(min(self._refused))

    def seconds(self, nbytes: int) -> float:
        """To read this many bytes that are not in memory, as measured with a file of its own.
        Raises ConfigError where none can be written."""
        probe = self.folder / _temporary()
        part = memoryview(bytearray(PROBED))
        try:
            _write(probe, [part])
            with probe.open("rb", buffering=0) as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                begin = time.perf_counter()
                _fill(file.fileno(), [part])
                _checksum([part])
                return (time.perf_counter() - begin) * nbytes / PROBED
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise unwritable(f"--disk-cache {self.folder}", e, "one on a local disk") from e
            self.stop(e)
            return 0.0  # nobody knows
        finally:
            with suppress(OSError):
                probe.unlink()

    def stop(self, error: Exception) -> None:
        """Write nothing any more, for this reason."""
        why = error.strerror if isinstance(error, OSError) else ""
        why = why or f"{type(error).__name__}: {error}".removesuffix(": ")
        self.stopped = f"{self.folder}: {why}: no more pages are written there"

    def has(self, name: bytes, kind: str) -> bool:
        """Whether a file of this name is there, whole or not. kind: "page" or "state"."""
        path = self._path(name, kind)
        return path not in self._refused and _is_page(path)

    def reach(self, sought: Iterable[Sought]) -> int:
        """How many of a prompt's pages, from the first on, a request can continue after."""
        last = 0
        for count, one in enumerate(sought, 1):
            if not (one.page or self.has(one.name, "page")):
                break
            if one.state or self.has(one.name, "state"):
                last = count
        return last

    def write(self, name: bytes, kind: str, parts: Sequence[memoryview]) -> int:
        """The bytes that were written: none where the file is there already, or writing has
        stopped. An error of the disk stops it."""
        path, nbytes = self._path(name, kind), sum(part.nbytes for part in parts)
        if self.stopped or self._used(path) or not self._erased(path):
            return 0
        temporary = path.with_name(_temporary())
        try:
            self._make_room(_HEAD.size + nbytes)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            head = _HEAD.pack(_MAGIC, VERSION, _checksum(parts), name, nbytes)
            _write(temporary, [memoryview(head), *parts])
            temporary.rename(path)
        except BaseException as e:
            with suppress(OSError):
                temporary.unlink()
            if not isinstance(e, OSError):
                raise
            self.stop(e)
            return 0
        self._held += _HEAD.size + nbytes
        return nbytes

    def read(self, name: bytes, kind: str, parts: Sequence[memoryview]) -> bool:
        """Fill `parts` with what was written under this name; False where that is not there, torn,
        of another version, of another size or refused. Such a file is deleted, and one that the
        disk or its permissions let nobody read."""
        path, nbytes = self._path(name, kind), sum(part.nbytes for part in parts)
        head = bytearray(_HEAD.size)
        if path in self._refused:
            return False
        try:
            with open(os.open(path, _READ), "rb", buffering=0) as file:
                right = os.fstat(file.fileno()).st_size == len(head) + nbytes
                right = right and _fill(file.fileno(), [memoryview(head), *parts])
                if right and bytes(head) == _HEAD.pack(
                    _MAGIC, VERSION, _checksum(parts), name, nbytes
                ):
                    os.utime(file.fileno())  # it is among the last to leave
                    now = os.fstat(file.fileno())
                    kept = now.st_nlink > 0 and now.st_size == len(head) + nbytes
                    if not kept or path in self._refused:
                        return False  # somebody has deleted it meanwhile
                    if not self._note(path).exists():
                        return True
        except OSError as e:
            if e.errno not in _UNREADABLE or not _is_page(path):
                return False
        self._refuse(path)
        return False

    def forget(self, name: bytes, kind: str) -> None:
        """Delete a file, if it is there. One that cannot be is emptied: nobody reads that. Where
        this fails, too, nobody reads it from now on, and writing stops, whose reason says so."""
        self._refuse(self._path(name, kind))

    def _refuse(self, path: Path) -> None:
        try:
            self._erase(path)
        except OSError as e:
            noted = ""
            try:
                self._write_note(path)
            except OSError as none:
                where = self._note(path)
                noted = f", nor noted in {where} ({none.strerror}), so a restart would read it"
            more = len(self._refused) - 1
            others = f" and {more} more, listed in {self.folder / _NOTES}," if more else ""
            said = f"{path}{others} must not be read any more, and cannot be deleted ({e.strerror})"
            self.stop(OSError(e.errno, f"{said}{noted}: delete {'them' if more else 'it'}"))

    def _note(self, path: Path) -> Path:
        return self.folder / _NOTES / f"{path.parent.name}{path.name}"

    def _write_note(self, path: Path) -> None:
        note = self._note(path)
        note.parent.mkdir(mode=0o700, exist_ok=True)
        for one, how in ((note, os.O_WRONLY | os.O_CREAT), (note.parent, os.O_RDONLY)):
            descriptor = os.open(one, how | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _read_notes(self) -> list[Path]:
        """What this server or another was to delete, and could not."""
        try:
            names = sorted(os.listdir(self.folder / _NOTES))
        except FileNotFoundError:
            return []
        found = filter(None, map(_NOTED.fullmatch, names))
        return [self.folder / one[1] / one[2] for one in found]

    def _erase(self, path: Path) -> None:
        """Raises OSError where it stays as it is."""
        self._refused.add(path)
        try:
            path.unlink()
        except FileNotFoundError:
            pass
        except OSError:
            with suppress(FileNotFoundError):  # there was none, or another server has deleted it
                if stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode):
                    how = os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                    os.close(os.open(path, how))
        with suppress(OSError):
            self._note(path).unlink()
        self._refused.discard(path)

    def _erased(self, path: Path) -> bool:
        """Whether nothing is there that must not be read: it may have become possible to delete."""
        if path in self._refused:
            with suppress(OSError):
                self._erase(path)
        return path not in self._refused

    def _path(self, name: bytes, kind: str) -> Path:
        said = name.hex()
        return self.folder / said[:2] / f"{said[2:]}.{kind}"

    def _used(self, path: Path) -> bool:
        """Whether it is there; it is among the last to leave then."""
        try:
            if path in self._refused or not _is_page(path):
                return False
            os.utime(path)
        except OSError:
            return False
        return True

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for outer in os.scandir(self.folder):
            if _TEMPORARY.fullmatch(outer.name) and outer.is_file(follow_symlinks=False):
                yield outer
            elif _FOLDER.fullmatch(outer.name) and outer.is_dir(follow_symlinks=False):
                with suppress(OSError), os.scandir(outer) as inner:  # nobody may read it, or gone
                    for entry in inner:
                        if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                            yield entry

    def _make_room(self, nbytes: int) -> None:
        """Delete the files used least recently where these bytes would be too many."""
        if self._held + nbytes <= self.size and time.monotonic() < self._scanned + _SCAN:
            return
        found = list[tuple[float, int, str]]()
        for entry in self._files():
            with suppress(FileNotFoundError):  # another server has deleted it
                said = entry.stat(follow_symlinks=False)
                torn = entry.name.endswith(".tmp") and time.time() > said.st_mtime + _TORN
                found.append((0.0 if torn else said.st_mtime, said.st_size, entry.path))
        self._held, self._scanned = sum(size for _, size, _ in found), time.monotonic()
        most = int(_LEFT * self.size) if self._held + nbytes > self.size else self.size
        for at, size, path in sorted(found):
            if at and self._held + nbytes <= most:
                break
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass  # another server has deleted it
            except OSError:
                continue  # nobody may: it stays, and counts
            self._held -= size
        if self._held + nbytes > self.size:
            raise OSError(0, f"a page does not fit into --disk-cache-size {amount(self.size)}")


def _temporary() -> str:
    """Nobody else's: process ids are alike in containers."""
    return f".{secrets.token_hex(16)}.tmp"


def _is_page(path: Path) -> bool:
    """A file, and not one that is emptied as nobody could delete it."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


def _checksum(parts: Sequence[memoryview]) -> int:
    found = 0
    for part in parts:
        found = crc32(part, found)
    return found


def _write(path: Path, parts: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        for part in _gathered(parts):
            done = os.writev(descriptor, part)
            left = memoryview(b"".join(part))[done:] if done < sum(map(len, part)) else None
            while left:
                left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def _fill(descriptor: int, parts: Sequence[memoryview]) -> bool:
    return all(os.readv(descriptor, some) == sum(map(len, some)) for some in _gathered(parts))


def _gathered(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """As many at a time as one call takes."""
    for first in range(0, len(parts), 512):
        yield [*parts[first : first + 512]]
