"""ZeroMQ sockets over files in a private folder: the only door into an engine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from ds_runtime.errors import ConfigError

_PREFIX, _OWNER = "ds-runtime-", "owner"
_held: dict[Path, int] = {}  # this process's folders, with the descriptors that lock them
_LINGER = 500  # milliseconds
_LONGEST = 100  # a Unix socket path holds about 107 bytes


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can enter; removed with its contents at the end."""
    folder = make_private_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_private_folder() -> Path:
    """As `private_folder`, for those that remove it themselves.

    Also removes the folders of owners that were killed together with all their ranks. An owner
    holds a lock on a file in its folder for as long as it lives.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    _held[folder] = _hold(folder)
    return folder


def _hold(folder: Path) -> int:
    """Lock the owner's file, which appears only once it is locked; its descriptor."""
    part = folder / f"{_OWNER}.part"
    file = os.open(part, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    part.rename(folder / _OWNER)
    return file


def _sweep() -> None:
    for folder in [f for f in list(_held) if not f.exists()]:
        os.close(_held.pop(folder))
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, gone meanwhile, or its owner lives
            found = folder.lstat()
            if folder in _held or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            file = os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)


def ipc(folder: Path, name: str) -> str:
    """The address of the socket `name` in `folder`."""
    path = os.fspath(folder / name)
    if len(os.fsencode(path)) > _LONGEST:
        raise ConfigError(f"{path}: too long for a socket; set TMPDIR to a shorter folder")
    return f"ipc://{path}"


def bind_pull(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A receiving socket that keeps everything sent to it."""
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket


def connect_push(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A sending socket that never blocks; closing waits a moment for what is unsent."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, _LINGER)
    socket.connect(address)
    return socket
