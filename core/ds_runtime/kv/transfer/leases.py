"""The engine that has a prompt's pages: for whom it holds them, and how long.

A lease ends with time, with its reader, or where running requests need the room. However often its
reader renews it, its time has an end, and others hold at most half of all pages and snapshots.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from ds_runtime.kv.chain import page_keys
from ds_runtime.kv.prefix import Node, Realm
from ds_runtime.kv.rank_pages import Pages
from ds_runtime.kv.snapshots import PinnedBlock
from ds_runtime.platform.kv_transfer import (
    MOST_BLOCKS,
    MOST_BYTES,
    CacheBlocks,
    Count,
    KvTransfer,
    Numbers,
    TransferError,
)

LONGEST, PER_PAGE = 300.0, 0.1  # seconds of a pull, and as many more for each page
SOON = 1.0  # seconds in which a reader most likely speaks
LEAST = 1.0  # seconds that a lease lasts at least from each word of its reader
MOST_LEASES = 1024
MOST_SECONDS = 3600.0  # of a lease whose reader has not spoken yet, or not since


def longest(pages: int) -> float:
    """Seconds that somebody may read for, however often the lease is renewed."""
    return LONGEST + PER_PAGE * pages


class Offer(msgspec.Struct, frozen=True):
    """What a reader needs to know. key: of the last page (`kv.keys`). seconds: of the lease."""

    description: Annotated[bytes, Meta(max_length=MOST_BYTES)]
    lease: Count
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    pages: Numbers
    states: Annotated[list[Count], Meta(max_length=1)]
    seconds: Annotated[float, Meta(gt=0, le=MOST_SECONDS)]


class Want(msgspec.Struct, tag=True, frozen=True):
    """The sender reads what this lease holds."""

    lease: Count


class Done(msgspec.Struct, tag=True, frozen=True):
    """It has read all, or gives up."""

    lease: Count


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The lease is no more. whole: until its reader was done."""

    lease: Count
    whole: bool


Notices = Want | Done | Ended


def tell(transfer: KvTransfer, peer: str, said: Notices) -> None:
    """Notify a peer. One that takes nothing is as if it were gone, and leases end by time."""
    with suppress(TransferError):
        transfer.notify(peer, msgspec.msgpack.encode(said))


@dataclass(slots=True, eq=False)
class Lease:
    """node: the deepest of `count` pages, under a reference, so that none of them becomes another.
    pin: on its snapshot. since: when it was made. reader: its name, once it has spoken; last: when
    it must be done."""

    number: int
    node: Node
    count: int
    pin: PinnedBlock | None
    seconds: float
    since: float
    until: float
    reader: str = ""
    last: float = 0.0


class Leases:
    """Those of one engine. pages: its pool and prefix cache; transfer: registered already. settle:
    queues copies of states that are only noted yet. now: a clock, in seconds.
    """

    def __init__(
        self,
        pages: Pages,
        transfer: KvTransfer,
        settle: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        assert pages.prefix is not None, "there is nothing to hand over without a prefix cache"
        self.pages, self.prefix, self.transfer = pages, pages.prefix, transfer
        self.settle, self.now = settle, now
        self._leases: dict[int, Lease] = {}
        self._held = Counter[Node]()  # by how many leases
        self._count = self.num_given = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def is_read(self) -> bool:
        """Whether somebody reads now, or was offered pages a moment ago and may begin."""
        soon = self.now() - SOON
        return any(lease.reader or lease.since > soon for lease in self._leases.values())

    @property
    def num_held(self) -> int:
        """Pages that leases keep from being evicted."""
        return len(self._held)

    def hold(self, tokens: Sequence[int], realm: Realm, root: bytes, seconds: float) -> bytes:
        """An offer of what is cached of a prompt. Raises TransferError where nothing is."""
        if not 0 < seconds <= MOST_SECONDS:
            raise TransferError(f"seconds {seconds}: give more than 0 and at most {MOST_SECONDS}")
        size = self.pages.page_size
        tokens = tokens[: MOST_BLOCKS * size + 1]
        found = self.prefix.match(tokens, realm)
        if not found.pages:
            raise TransferError("no page of this prompt is cached here: have it computed first")
        *_, key = islice(page_keys(root, tokens, size), len(found.pages))
        path, said = list(_path(found.node)), self.transfer.describe()
        self._check_shares(path)
        snapshots = self.pages.snapshots
        pin = None if snapshots is None else snapshots.pin(found.node)
        self.prefix.lock(found.node)
        self._held.update(path)
        self._count += 1
        now = self.now()
        lease = Lease(self._count, path[0], len(path), pin, seconds, now, now + seconds)
        self._leases[lease.number] = lease
        states = [] if pin is None else [pin.block]
        try:
            self.settle()  # its reader may look before this engine does anything more
            self.transfer.expose(CacheBlocks(found.pages, states))
        except BaseException:
            self.end(lease)
            raise
        offer = Offer(said, lease.number, key, found.pages, states, seconds)
        return msgspec.msgpack.encode(offer)

    def _check_shares(self, path: list[Node]) -> None:
        """Others get at most half of all, lest requests wait for them; or one prompt, however long
        it is. Raises TransferError."""
        if len(self._leases) >= MOST_LEASES:
            raise TransferError(f"{MOST_LEASES} prompts are held for others: try again later")
        if not self._leases:
            return
        most, more = self.pages.pool.num_pages // 2, sum(n not in self._held for n in path)
        if more and len(self._held) + more > most:
            raise TransferError(
                f"{len(self._held)} pages are held for others, and with {more} more it were over "
                f"half of all, {most}: try again once some are read"
            )
        if (snapshots := self.pages.snapshots) is None or snapshots.is_pinned(path[0]):
            return
        if snapshots.num_pinned >= (most := snapshots.pool.num_pages // 2):
            raise TransferError(
                f"{snapshots.num_pinned} snapshots are held for others, of {most} that may be "
                "(half of --state-snapshots): try again once some are read"
            )

    def wanted(self, peer: str, number: int) -> None:
        lease, now = self._leases.get(number), self.now()
        if lease is None or lease.reader not in ("", peer):
            return self._tell(peer, Ended(number, whole=False))
        if not lease.reader:
            lease.reader, lease.last = peer, now + longest(lease.count)
        lease.until = min(now + max(lease.seconds, LEAST), lease.last)

    def done(self, peer: str, number: int) -> None:
        lease = self._leases.get(number)
        if lease is None or lease.reader != peer:
            return self._tell(peer, Ended(number, whole=False))
        whole = self._stands(lease)
        self.num_given += whole * lease.count
        self.end(lease)
        self._tell(peer, Ended(number, whole))

    @staticmethod
    def _stands(lease: Lease) -> bool:
        """Whether its blocks are still what they were: nobody has found them to be broken."""
        stands = lease.pin is None or lease.pin.stands
        return stands and not any(node.is_cut for node in _path(lease.node))

    def end(self, lease: Lease) -> None:
        del self._leases[lease.number]
        for node in _path(lease.node):
            self._held[node] -= 1
            if not self._held[node]:
                del self._held[node]
        if self.pages.snapshots is not None and lease.pin is not None:
            self.pages.snapshots.unpin(lease.pin)
        self.prefix.unlock(lease.node)

    def lose(self, peer: str) -> None:
        """A peer is gone."""
        for lease in [one for one in self._leases.values() if one.reader == peer]:
            self.end(lease)

    def expire(self, now: float) -> None:
        """End those whose time is over."""
        for lease in [one for one in self._leases.values() if now > one.until]:
            self._revoke(lease)

    def leave(self) -> None:
        """End one, if there is any."""
        for lease in [*self._leases.values()][:1]:
            self._revoke(lease)

    def drop(self) -> None:
        """End all; nobody is told."""
        for lease in [*self._leases.values()]:
            self.end(lease)

    def _revoke(self, lease: Lease) -> None:
        self.end(lease)
        if lease.reader:
            self._tell(lease.reader, Ended(lease.number, whole=False))

    def _tell(self, peer: str, said: Notices) -> None:
        tell(self.transfer, peer, said)


def _path(node: Node) -> Iterator[Node]:
    """A page's node and those above it, but for the root."""
    while node.parent is not None:
        yield node
        node = node.parent
