"""ZeroMQ sockets over files in a private folder: the only door into an engine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from ds_runtime.errors import ConfigError

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
    """As `private_folder`, for those that remove it themselves."""
    return Path(tempfile.mkdtemp(prefix="ds-runtime-"))


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


def connect_push(
    context: zmq.Context[zmq.Socket[bytes]], address: str, linger_ms: int = 500
) -> zmq.Socket[bytes]:
    """A sending socket that never blocks; closing waits `linger_ms` for what is unsent."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.connect(address)
    return socket
