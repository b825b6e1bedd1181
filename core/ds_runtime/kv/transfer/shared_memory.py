"""Memory that two processes of one machine have in common, for pieces on their way.

It has no name, so that nothing of it stays when both have been killed. The other process opens it
by this one's number, which only works for the same user in the same container. Elsewhere, and where
the system has no such memory, pieces go by the socket.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from mmap import mmap
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from ds_runtime.platform.kv_transfer import Count

_HEAD = 4096  # bytes in front of the slots: the proof
_PROOF = 32


class Offered(msgspec.Struct, frozen=True):
    """Says where the memory is. proof: its first bytes, which show that it is the right one."""

    process: Count
    file: Count
    size: Annotated[int, Meta(gt=0, le=1 << 34)]
    proof: Annotated[bytes, Meta(min_length=_PROOF, max_length=_PROOF)]


class Slots:
    """`count` slots of `size` bytes each: a tensor for each of them."""

    def __init__(self, memory: mmap, size: int, count: int, offered: Offered | None = None) -> None:
        self.offered = offered
        held = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = held[_HEAD : _HEAD + size * count].view(count, size)

    def __getitem__(self, slot: int) -> Tensor:
        """[size] uint8."""
        return self._slots[slot]


def share(size: int, count: int) -> Slots | None:
    """New slots that another process may open; None where the system has none."""
    if sys.platform != "linux":
        return None
    import fcntl

    total = _HEAD + size * count
    file = -1
    try:
        file = os.memfd_create("ds-runtime-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, total)
        # Nobody can make it smaller: whoever reads it would end with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        memory, proof = mmap(file, total), secrets.token_bytes(_PROOF)
    except OSError:
        if file >= 0:
            os.close(file)
        return None
    memory[:_PROOF] = proof
    return _Owned(memory, size, count, Offered(os.getpid(), file, total, proof))


class _Owned(Slots):
    """Those of this process."""

    def __del__(self) -> None:
        if self.offered is not None:
            os.close(self.offered.file)


def open_shared(offered: Offered, size: int, count: int) -> Slots | None:
    """What another process shares; None where it cannot be had, or is something else."""
    if sys.platform != "linux" or offered.size != _HEAD + size * count:
        return None
    import fcntl

    path, file = f"/proc/{offered.process}/fd/{offered.file}", -1
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        held = os.fstat(file)
        if not stat.S_ISREG(held.st_mode) or held.st_size != offered.size:
            return None
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        memory = mmap(file, offered.size)
    except OSError:
        return None
    finally:
        if file >= 0:
            os.close(file)
    return Slots(memory, size, count) if memory[:_PROOF] == offered.proof else None
