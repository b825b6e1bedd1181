"""The kit over what moves pages: the references conform, and each kind of mistake is named."""

from __future__ import annotations

import itertools

import pytest

from ds_runtime.kv.transfer.host import HostTransfer
from ds_runtime.kv.transfer.sockets import SocketTransfer
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.platform.kv_transfer import CacheBlocks, Polled, Transfer, TransferError
from ds_runtime_kit import transfers
from ds_runtime_kit.transfers import QUESTIONS, check_transfer

CPU = DeviceInfo("cpu", "a CPU", "x86")


def hosts(kind=HostTransfer):
    net, names = {}, itertools.count()
    return lambda origin: kind(f"{next(names)}", origin, net)


def sockets(folder, **more):
    names = itertools.count()
    return lambda origin: SocketTransfer(origin, f"ipc://{folder}/{next(names)}", **more)


@pytest.mark.parametrize("way", ["host", "shared memory", "socket"])
def test_the_references_conform(tmp_path, way):
    make = hosts() if way == "host" else sockets(tmp_path, share_memory=way == "shared memory")
    found = check_transfer(make, CPU)
    assert [r.check for r in found] == list(QUESTIONS) and {r.failure for r in found} == {""}


class Wrong(HostTransfer):
    """Each breaks one promise."""


class Forgets(Wrong):
    def _copy(self, other, read):
        read.local, read.remote = CacheBlocks(read.local.pages), CacheBlocks(read.remote.pages)
        super()._copy(other, read)


class TellsTwice(Wrong):
    last = Polled([], [], [])

    def poll(self):
        found = super().poll()
        found.finished.extend(self.last.finished)
        self.last = Polled(found.finished[:1], [], [])
        return found


class TakesAny(Wrong):
    def ticket(self, peer, local, remote, tag):
        try:
            return super().ticket(peer, local, remote, tag)
        except TransferError:
            return super().ticket(peer, CacheBlocks([0]), CacheBlocks([0]), tag)


class Goes(Wrong):
    def release(self, ticket):
        """On."""


class Mute(Wrong):
    def notices(self):
        return [(peer, notice) for peer, notice in super().notices() if notice != b"2"]


class Immortal(Wrong):
    def poll(self):
        found = super().poll()
        return Polled(found.finished, found.failed, [])


@pytest.mark.parametrize(
    ("kind", "check", "said"),
    [
        (Forgets, "reads", "blocks are not those that were read"),
        (TellsTwice, "reads", "a read ends twice"),
        (TakesAny, "refuses", "is begun"),
        (Goes, "releases", "a read that was given up"),
        (Mute, "notices", "nothing came of it"),
        (Immortal, "ends", "tells of [] as lost"),
    ],
)
def test_a_mistake_is_named(kind, check, said, monkeypatch):
    monkeypatch.setattr(transfers, "SECONDS", 0.2)
    (found,) = check_transfer(hosts(kind), CPU, (check,))
    assert said in found.failure


def test_a_transfer_of_a_plugin_may_start_from_the_base():
    assert issubclass(HostTransfer, Transfer) and issubclass(SocketTransfer, Transfer)
