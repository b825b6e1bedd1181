"""The kit over what moves pages: the references conform, and each kind of mistake is named."""

from __future__ import annotations

import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


class Late(Wrong):
    """Keeps what somebody said who is gone."""

    def poll(self):
        kept, found = self._notices, super().poll()
        self._notices = kept
        return found


class Device:
    """Runs what it is told 50 ms later, one thing after the other."""

    def __init__(self) -> None:
        self._queue = ThreadPoolExecutor(1)

    def late(self, do) -> None:
        self._queue.submit(lambda: (time.sleep(0.05), do()))

    def wait(self) -> None:
        self._queue.submit(int).result()


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ("expose read", ""),
        ("expose", "what was queued before a read writes to its blocks after it"),
        ("", "blocks are read before they were written"),
    ],
)
def test_a_fabric_waits_for_the_device(waits, said):
    """It reaches into memory by itself: what its device has queued is nothing that it waits for,
    unless it sees to it in front of an offer and of a read."""
    device = Device()

    class Fabric(HostTransfer):
        def expose(self, blocks):
            if "expose" in waits:
                device.wait()

        def read(self, peer, local, remote, tag):
            if "read" in waits:
                device.wait()
            return super().read(peer, local, remote, tag)

    (found,) = check_transfer(hosts(Fabric), CPU, ("orders",), late=device.late)
    device.wait()
    assert found.failure.startswith(said) and bool(found.failure) == bool(said)


@pytest.mark.parametrize(
    ("kind", "check", "said"),
    [
        (Forgets, "reads", "blocks are not those that were read"),
        (TellsTwice, "reads", "a read ends twice"),
        (TakesAny, "refuses", "is begun"),
        (Goes, "releases", "a read that was given up"),
        (Mute, "notices", "nothing came of it"),
        (Immortal, "ends", "tells of [] as lost"),
        (Late, "ends", "after that it says [('1', b'before it left')]"),
    ],
)
def test_a_mistake_is_named(kind, check, said, monkeypatch):
    monkeypatch.setattr(transfers, "SECONDS", 0.2)
    (found,) = check_transfer(hosts(kind), CPU, (check,))
    assert said in found.failure


def test_the_transfer_of_the_documents_is_one():
    """It starts from the base, and describes itself in a form that its like understands."""
    page = (Path(__file__).parents[3] / "docs" / "kv-transfer.md").read_text(encoding="utf-8")
    plugin = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    held: dict = {}
    exec(compile(plugin, "kv-transfer.md", "exec"), held)
    one, other = (held["ds_kv_transfer"](None, b"origin") for _ in range(2))
    other.name = "another name"
    assert isinstance(one, Transfer) and one.attach(other.describe()) == "another name"
    assert one.read("another name", CacheBlocks(), CacheBlocks(), "tag").tag == "tag"
    with pytest.raises(TransferError, match=r"moves pages by 'host', and this engine by 'acme.v1'"):
        one.attach(HostTransfer("third", b"origin", {}).describe())
