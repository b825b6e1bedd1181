"""Files of a checkpoint as strangers wrote them: plain files alone are read, and this many bytes.

A pipe would never end, a device never be empty, and a sparse file costs its writer nothing.
Torch-free.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from ds_runtime.errors import CheckpointError

SETTINGS = 16 << 20  # bytes of a file of settings; published ones take less than one MiB
LISTS = 64 << 20  # of one that grows with the vocabulary or with the tensors
HEADER = 100 << 20  # of the header of a safetensors file
_POINTER, _LONGEST = b"version https://git-lfs.github.com/spec/", 1024  # bytes
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


class Stamp(NamedTuple):
    """What changes with a file's bytes, whatever its writer sets back."""

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds, as the next
    changed: int

    @staticmethod
    def of(path: Path) -> Stamp:
        """Where links lead to. Raises OSError."""
        at = path.stat()
        return Stamp(at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)


Stamps = Mapping[Path, Stamp]


def open_plain(path: Path) -> IO[bytes]:
    """A plain file, open for reading; CheckpointError for anything else and for what Git LFS puts
    in a file's place, OSError as ever."""
    if not stat.S_ISREG(mode := path.stat().st_mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError(f"{path}: is {kind}; put the model's own file in its place")
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if os.fstat(opened).st_size < _LONGEST:
        begin = os.read(opened, len(_POINTER))
        os.lseek(opened, 0, os.SEEK_SET)
        if begin == _POINTER:
            os.close(opened)
            raise CheckpointError(
                f"{path}: is a pointer of Git LFS, and no file of the model: run git lfs pull in "
                "its folder, or download the model with hf download"
            )
    return open(opened, "rb")


def read_bytes(path: Path, most: int = SETTINGS) -> bytes:
    """The bytes of a plain file, which links may lead to. It never waits.

    Raises CheckpointError for anything but a plain file, for one of more than `most` bytes, and
    for one that cannot be read.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            found = b"" if size > most else file.read(most + 1)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from e
    size = max(size, len(found))
    if size > most:
        raise CheckpointError(
            f"{path}: has {size} bytes, and no such file has more than {most >> 20} MiB; put the "
            "model's own file in its place"
        )
    return found


def read_text(path: Path, most: int = SETTINGS) -> str:
    """The same as text; CheckpointError as well where it is not UTF-8."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{path}: is not UTF-8 at byte {e.start}; download it again") from e


def read_object(path: Path, most: int = SETTINGS) -> dict[str, Any]:
    """The JSON object in a plain file; CheckpointError as well where it holds none."""
    try:
        found = json.loads(read_text(path, most))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}. Download the file again") from e
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds {type(found).__name__}: an object is needed")
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """The same of settings, or an empty object where there is no such file."""
    return read_object(path) if path.exists() else {}
