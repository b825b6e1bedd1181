"""KvTransfer between engines of one process, through host memory: the shortest reference."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ds_runtime.platform.kv_transfer import (
    MOST_NOTICES,
    CacheBlocks,
    Polled,
    Ticket,
    Transfer,
    TransferError,
    check_notice,
)


@dataclass(slots=True)
class _Begun:
    ticket: Ticket
    peer: str
    local: CacheBlocks
    remote: CacheBlocks


class HostTransfer(Transfer):
    """net: the engines that can reach each other, by name."""

    kind = "host"

    def __init__(self, name: str, origin: bytes, net: dict[str, HostTransfer]) -> None:
        super().__init__(name, origin)
        self._net = net
        self._reads: deque[_Begun] = deque()
        self._notices: list[tuple[str, bytes]] = []
        net[name] = self

    def attach(self, description: bytes) -> str:
        """As KvTransfer."""
        said = self.admit(description)
        self._peers[said.name] = said
        if (other := self._net.get(said.name)) is not None:
            other._peers.setdefault(self.name, other.admit(self.describe()))
        return said.name

    def read(self, peer: str, local: CacheBlocks, remote: CacheBlocks, tag: str) -> Ticket:
        """As KvTransfer."""
        ticket = self.ticket(peer, local, remote, tag)
        self._reads.append(_Begun(ticket, peer, local, remote))
        return ticket

    def poll(self) -> Polled:
        """As KvTransfer. Copies are made here."""
        polled = Polled([], [], [name for name in self._peers if name not in self._net])
        while self._reads:
            read = self._reads.popleft()
            other = self._net.get(read.peer)
            if other is None:
                polled.failed.append((read.ticket, f"peer {read.peer!r} is gone"))
            elif not other.holds(read.remote):
                said = f"peer {read.peer!r} has {other._pages} pages, and had said more"
                polled.failed.append((read.ticket, said))
            else:
                self._copy(other, read)
                polled.finished.append(read.ticket)
        for name in polled.lost:
            del self._peers[name]
        self._notices = [said for said in self._notices if said[0] not in polled.lost]
        return polled

    def _copy(self, other: HostTransfer, read: _Begun) -> None:
        for layer in range(len(self.layers)):
            here = self.layers.numbers(layer, read.local)
            there = other.layers.numbers(layer, read.remote)
            host = self._copies.buffer(len(here), self.layers.size(layer))
            other._copies.save([other.layers.some(layer, there, host)]).finish()
            self._copies.load([self.layers.some(layer, here, host)]).finish()

    def notify(self, peer: str, notice: bytes) -> None:
        """As KvTransfer. Raises TransferError where the peer has taken none for long."""
        check_notice(notice)
        if (other := self._net.get(peer)) is not None:
            if len(other._notices) >= MOST_NOTICES:
                raise TransferError(f"peer {peer!r} has not taken the last {MOST_NOTICES} notices")
            other._notices.append((self.name, notice))

    def notices(self) -> list[tuple[str, bytes]]:
        """As KvTransfer."""
        come, self._notices = self._notices, []
        return come

    def release(self, ticket: Ticket) -> None:
        """As KvTransfer."""
        self._reads = deque(read for read in self._reads if read.ticket != ticket)

    def close(self) -> None:
        """As KvTransfer."""
        self._net.pop(self.name, None)
        self._reads.clear()
