"""Pages that go from one engine to another: the contract, and its reference in host memory.

The engine that wants pages reads them from the one that has them. It hands out pages of its own
again only when `poll` has told of the read, or `release` has given it up. What a peer says of
itself is plain data, and every number in it has a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import torch

from ds_runtime.errors import DsRuntimeError
from ds_runtime.ops.contract import load_attr
from ds_runtime.ops.contracts.caches import Caches

MOST_BYTES = 1 << 18  # of a description, or of a notice
MOST_PAGES = 1 << 16  # of one read
MOST_NOTICES = 1 << 12  # that wait to be taken


class TransferError(DsRuntimeError):
    """A peer cannot be attached, or a read cannot be begun."""


class Region(msgspec.Struct, frozen=True):
    """The pages of one layer of one group. page: bytes of one, as its layout exports it."""

    group: str
    layer: int
    page: int


class Description(msgspec.Struct, frozen=True):
    """What an engine says of itself. origin: the root of its pages' keys (`kv.keys`)."""

    name: str
    origin: bytes
    pages: int
    regions: list[Region]


class Ticket(NamedTuple):
    """A read that was begun. tag: the reader's own word for it."""

    number: int
    tag: str


class Polled(NamedTuple):
    """Reads that have ended since: all pages are here, or why they are not."""

    finished: list[Ticket]
    failed: list[tuple[Ticket, str]]


class KvTransfer(Protocol):
    """Behaviour of what moves pages. One thread calls it; nothing waits for a peer."""

    def register(self, caches: Caches, pages: int) -> None:
        """Say which caches pages are read from and written to."""

    def describe(self) -> bytes:
        """What a peer needs to attach: at most `MOST_BYTES`."""
        ...

    def attach(self, description: bytes) -> str:
        """Returns the peer's name. Raises TransferError for what is no description, or for pages
        of another origin."""
        ...

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], tag: str) -> Ticket:
        """Begin to copy pages `remote` of a peer to `local`. Raises TransferError for pages that
        are not there."""
        ...

    def poll(self) -> Polled:
        """What has ended since the last call."""
        ...

    def notify(self, peer: str, notice: bytes) -> None:
        """Send a peer a few bytes; they are lost if it is gone."""

    def notices(self) -> list[tuple[str, bytes]]:
        """(peer, bytes) that have come since the last call."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Give a read up, if it has not ended: nothing is written to its pages any more."""


@dataclass(slots=True)
class _PageRead:
    ticket: Ticket
    peer: str
    local: list[int]
    remote: list[int]


class HostTransfer:
    """The reference: engines of one process, whose pages go through host memory. net: those that
    can reach each other, by name."""

    def __init__(self, name: str, origin: bytes, net: dict[str, HostTransfer]) -> None:
        self.name, self.origin = name, origin
        self._net = net
        self._caches, self._pages = Caches(()), 0
        self._peers: dict[str, Description] = {}
        self._reads: deque[_PageRead] = deque()
        self._notices: list[tuple[str, bytes]] = []
        self._count = 0
        net[name] = self

    def register(self, caches: Caches, pages: int) -> None:
        """As KvTransfer."""
        self._caches, self._pages = caches, pages

    def _regions(self) -> list[Region]:
        return [
            Region(laid.group.name, layer, laid.page_bytes)
            for laid, made in self._caches.groups
            for layer in (made if laid.group.blocks(1, 0) else ())
        ]

    def describe(self) -> bytes:
        """As KvTransfer."""
        said = Description(self.name, self.origin, self._pages, self._regions())
        return msgspec.msgpack.encode(said)

    def attach(self, description: bytes) -> str:
        """As KvTransfer."""
        if len(description) > MOST_BYTES:
            raise TransferError(
                f"a peer's description has {len(description)} bytes, the limit is {MOST_BYTES}"
            )
        try:
            said = msgspec.msgpack.decode(description, type=Description)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise TransferError(f"what a peer said of itself is no description: {e}") from e
        if said.origin != self.origin or said.regions != self._regions():
            raise TransferError(
                f"peer {said.name!r}: its pages are of another model, adapter, layout, page size, "
                "dtype or salt, and mean nothing here: start both engines alike"
            )
        self._peers[said.name] = said
        return said.name

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], tag: str) -> Ticket:
        """As KvTransfer."""
        if (said := self._peers.get(peer)) is None:
            raise TransferError(f"peer {peer!r} is not attached")
        if len(local) != len(remote) or len(local) > MOST_PAGES or len({*local}) < len(local):
            raise TransferError(
                f"a read of {len(remote)} pages to {len(local)}: give each page a place of its "
                f"own, and {MOST_PAGES} at most"
            )
        for which, pages, count in (("here", local, self._pages), ("there", remote, said.pages)):
            if wrong := [page for page in pages if not 0 <= page < count]:
                raise TransferError(f"page {wrong[0]} {which}: there are {count}")
        self._count += 1
        ticket = Ticket(self._count, tag)
        self._reads.append(_PageRead(ticket, peer, [*local], [*remote]))
        return ticket

    def poll(self) -> Polled:
        """As KvTransfer. Copies are made here."""
        polled = Polled([], [])
        while self._reads:
            read = self._reads.popleft()
            other = self._net.get(read.peer)
            if other is None:
                polled.failed.append((read.ticket, f"peer {read.peer!r} is gone"))
                continue
            if max(read.remote, default=0) >= other._pages:
                said = f"peer {read.peer!r} has {other._pages} pages, and had said more"
                polled.failed.append((read.ticket, said))
                continue
            self._copy(other, read)
            polled.finished.append(read.ticket)
        return polled

    def _copy(self, other: HostTransfer, read: _PageRead) -> None:
        for laid, made in self._caches.groups:
            take, put = load_attr(laid.layout.export), load_attr(laid.layout.restore)
            for layer, cache in made.items() if laid.group.blocks(1, 0) else ():
                source = other._caches.of(laid.group.name, layer)
                there = torch.tensor(read.remote, dtype=torch.int64, device=source.device)
                here = torch.tensor(read.local, dtype=torch.int64, device=cache.device)
                put(cache, here, take(source, there).cpu().to(cache.device))

    def notify(self, peer: str, notice: bytes) -> None:
        """As KvTransfer."""
        if len(notice) > MOST_BYTES:
            raise TransferError(f"a notice of {len(notice)} bytes, the limit is {MOST_BYTES}")
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
        """Leave: reads of others from here fail."""
        self._net.pop(self.name, None)
        self._reads.clear()
