"""Cached prompts that go from one engine to another: who holds pages for whom, and how long.

The engine that has a prompt's pages holds them under a lease and makes an offer; whoever was given
the offer pulls them into its own prefix cache. A lease ends with time, with its reader, or where
running requests need the room, and the pages may then become others while they are read. So a
reader asks at the end whether the lease still stood, and keeps what it read only if it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from ds_runtime.kv.keys import page_keys
from ds_runtime.kv.prefix import Match, Node, Realm
from ds_runtime.kv.rank_pages import Pages
from ds_runtime.kv.transfer.asked import PagesPulled
from ds_runtime.platform.kv_transfer import (
    MOST_BLOCKS,
    MOST_BYTES,
    CacheBlocks,
    Count,
    KvTransfer,
    Numbers,
    Ticket,
    TransferError,
)

LONGEST = 300.0  # of a pull
MOST_LEASES = 1024
MOST_SECONDS = 3600.0  # of a lease that is not renewed


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


_Notices = Want | Done | Ended


@dataclass(slots=True, eq=False)
class _Lease:
    """node: the deepest of `count` pages, under a reference. states: a snapshot of it. reader: its
    name, once it has spoken."""

    number: int
    node: Node
    count: int
    states: list[int]
    seconds: float
    until: float
    reader: str = ""


@dataclass(slots=True, eq=False)
class _Pull:
    """node: what is here already, under a reference; tokens of the pages behind it. ticket None:
    all is read, and the lease is asked for."""

    token: str
    offer: Offer
    peer: str
    node: Node
    tokens: list[int]
    length: int
    local: CacheBlocks
    ticket: Ticket | None
    until: float
    renew: float


class Handover:
    """One engine's end. pages: its pool and prefix cache; transfer: registered already. settle:
    runs copies of states that are only noted yet, and returns once they are there. now: a clock,
    in seconds.
    """

    def __init__(
        self,
        pages: Pages,
        transfer: KvTransfer,
        settle: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        assert pages.prefix is not None, "there is nothing to hand over without a prefix cache"
        self._pages, self._prefix, self._transfer = pages, pages.prefix, transfer
        self._settle, self._now = settle, now
        self._leases: dict[int, _Lease] = {}
        self._pulls: dict[str, _Pull] = {}
        self._count = self.num_given = self.num_read = 0
        self._ended = list[PagesPulled]()
        pages.guests = self

    @property
    def busy(self) -> bool:
        """Whether `poll` is to be called soon."""
        return bool(self._leases or self._pulls or self._ended)

    @property
    def num_held(self) -> int:
        """Pages that leases keep from being evicted, of each lease for itself."""
        return sum(lease.count for lease in self._leases.values())

    @property
    def num_coming(self) -> int:
        """Pages that pulls write to."""
        return sum(len(pull.local.pages) for pull in self._pulls.values())

    # ---- the engine that has the pages ----

    def hold(self, tokens: Sequence[int], realm: Realm, root: bytes, seconds: float) -> bytes:
        """An offer of what is cached of a prompt. Raises TransferError where nothing is."""
        if not 0 < seconds <= MOST_SECONDS:
            raise TransferError(f"seconds {seconds}: give more than 0 and at most {MOST_SECONDS}")
        size = self._pages.page_size
        tokens = tokens[: MOST_BLOCKS * size + 1]
        found = self._prefix.match(tokens, realm)
        if not found.pages:
            raise TransferError("no page of this prompt is cached here: have it computed first")
        if len(self._leases) >= MOST_LEASES:
            raise TransferError(f"{MOST_LEASES} prompts are held for others: try again later")
        *_, key = islice(page_keys(root, tokens, size), len(found.pages))
        snapshots = self._pages.snapshots
        states = [] if snapshots is None else [snapshots.pin(found.node)]
        self._prefix.lock(found.node)
        try:
            self._settle()  # its reader may look before this engine does anything more
        except BaseException:
            self._prefix.unlock(found.node)
            if snapshots is not None:
                snapshots.unpin(found.node)
            raise
        self._count += 1
        given = self._count, found.node, len(found.pages), states
        lease = _Lease(*given, seconds, self._now() + seconds)
        self._leases[lease.number] = lease
        said = self._transfer.describe()
        offer = Offer(said, lease.number, key, found.pages, states, seconds)
        return msgspec.msgpack.encode(offer)

    def _wanted(self, peer: str, number: int) -> None:
        lease = self._leases.get(number)
        if lease is None or lease.reader not in ("", peer):
            return self._tell(peer, Ended(number, whole=False))
        lease.reader, lease.until = peer, self._now() + lease.seconds

    def _done(self, peer: str, number: int) -> None:
        lease = self._leases.get(number)
        whole = lease is not None and lease.reader == peer and self._stands(lease)
        self._tell(peer, Ended(number, whole))
        if lease is not None and lease.reader == peer:
            self.num_given += whole * lease.count
            self._end(lease)

    def _stands(self, lease: _Lease) -> bool:
        """Whether its blocks are still what they were: nobody has found them to be broken."""
        snapshots, node = self._pages.snapshots, lease.node
        kept = snapshots is None or [snapshots.block(node)] == lease.states
        while kept and node.parent is not None:
            kept, node = not node.is_cut, node.parent
        return kept

    def _end(self, lease: _Lease) -> None:
        del self._leases[lease.number]
        if self._pages.snapshots is not None:
            self._pages.snapshots.unpin(lease.node)
        self._prefix.unlock(lease.node)

    # ---- the engine that wants them ----

    def pull(
        self, token: str, tokens: Sequence[int], realm: Realm, root: bytes, offered: bytes
    ) -> None:
        """Begin to read what was offered of a prompt; `poll` tells how it has ended. Raises
        TransferError where it cannot begin."""
        try:
            offer = msgspec.msgpack.decode(offered, type=Offer)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise TransferError(f"what was offered is no offer: {e}") from e
        size, count = self._pages.page_size, len(offer.pages)
        key = next(islice(page_keys(root, tokens, size), max(0, count - 1), None), None)
        if not count or key != offer.key:
            raise TransferError(
                "the offer is of another prompt, model, adapter, layout, page size or salt: ask "
                "for one of this prompt, of an engine that was started alike"
            )
        if token in self._pulls:
            raise TransferError(f"pull {token!r} is under way: choose another name")
        peer = self._transfer.attach(offer.description)
        known = self._prefix.find([*tokens[: count * size], -1], realm)
        self._prefix.lock(known.node)
        local = CacheBlocks()
        try:
            local = self._room(offer, known, peer)
            remote = CacheBlocks(offer.pages[len(known.pages) :], offer.states[: len(local.states)])
            self._settle()
            ticket = self._transfer.read(peer, local, remote, token)
        except BaseException:
            self._give(local, known.node)
            raise
        now, behind = self._now(), [*tokens[len(known.pages) * size : count * size]]
        given = token, offer, peer, known.node, behind, count * size, local, ticket
        self._pulls[token] = _Pull(*given, now + LONGEST, now)
        self._renew(now)

    def _room(self, offer: Offer, known: Match, peer: str) -> CacheBlocks:
        """Blocks for what is missing here."""
        snapshots, missing = self._pages.snapshots, len(offer.pages) - len(known.pages)
        if len(offer.states) != (snapshots is not None):
            raise TransferError(f"peer {peer!r} keeps other states of a request than this engine")
        if (pages := self._pages.lend(missing)) is None:
            raise TransferError(f"{missing} pages are needed, and requests have them: try again")
        states = list[int]()
        if snapshots is not None and (missing or known.node not in snapshots):
            if (state := snapshots.reserve()) < 0:
                self._pages.pool.free(pages)
                raise TransferError("all --state-snapshots are taken by requests: try again later")
            states = [state]
        return CacheBlocks(pages, states)

    def _renew(self, now: float) -> None:
        for pull in self._pulls.values():
            if now >= pull.renew:
                pull.renew = now + pull.offer.seconds / 3
                self._tell(pull.peer, Want(pull.offer.lease))

    def _read(self, pull: _Pull) -> None:
        """All is here, if the lease still stands."""
        pull.ticket = None
        self._tell(pull.peer, Done(pull.offer.lease))

    def _keep(self, pull: _Pull) -> None:
        del self._pulls[pull.token]
        path, twins = self._prefix.extend(pull.node, pull.tokens, pull.local.pages)
        self._pages.pool.free(twins)
        if self._pages.snapshots is not None and pull.local.states:
            self._pages.snapshots.adopt(path.node, pull.local.states[0])
        self._prefix.unlock(path.node)
        self.num_read += len(pull.local.pages)
        self._ended.append(PagesPulled(pull.token, pull.length))

    def _fail(self, pull: _Pull, why: str) -> None:
        del self._pulls[pull.token]
        if pull.ticket is not None:
            self._transfer.release(pull.ticket)
            self._tell(pull.peer, Done(pull.offer.lease))
        self._give(pull.local, pull.node)
        self._ended.append(PagesPulled(pull.token, refused=why))

    def _give(self, blocks: CacheBlocks, node: Node) -> None:
        """Blocks of a pull, and its reference, are free again."""
        self._pages.pool.free(blocks.pages)
        if self._pages.snapshots is not None:
            for state in blocks.states:
                self._pages.snapshots.give(state)
        self._prefix.unlock(node)

    # ---- both ----

    def poll(self) -> list[PagesPulled]:
        """Go on with all that is under way; the pulls that have ended since."""
        polled = self._transfer.poll()
        for peer, notice in self._transfer.notices():
            self._hear(peer, notice)
        for ticket in polled.finished:
            if (pull := self._pulls.get(ticket.tag)) is not None and pull.ticket == ticket:
                self._read(pull)
        for ticket, why in polled.failed:
            if (pull := self._pulls.get(ticket.tag)) is not None and pull.ticket == ticket:
                self._fail(pull, why)
        for peer in polled.lost:
            self._lose(peer)
        self._expire(self._now())
        ended, self._ended = self._ended, []
        return ended

    def _hear(self, peer: str, notice: bytes) -> None:
        try:
            said = msgspec.msgpack.decode(notice, type=_Notices)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # somebody else's words
        if isinstance(said, Want):
            self._wanted(peer, said.lease)
        elif isinstance(said, Done):
            self._done(peer, said.lease)
        else:
            pulls = [*self._pulls.values()]
            for pull in (p for p in pulls if (p.peer, p.offer.lease) == (peer, said.lease)):
                if said.whole and pull.ticket is None:
                    self._keep(pull)
                else:
                    self._fail(
                        pull, f"peer {peer!r} holds these pages no more: ask it for an offer"
                    )

    def _lose(self, peer: str) -> None:
        for lease in [one for one in self._leases.values() if one.reader == peer]:
            self._end(lease)
        for pull in [one for one in self._pulls.values() if one.peer == peer]:
            self._fail(pull, f"peer {peer!r} has left before it said that its pages stood")

    def _expire(self, now: float) -> None:
        for lease in [one for one in self._leases.values() if now > one.until]:
            self._revoke(lease)
        for pull in [one for one in self._pulls.values() if now > one.until]:
            self._fail(pull, f"peer {pull.peer!r} did not give all pages within {LONGEST:.0f} s")
        self._renew(now)

    def _revoke(self, lease: _Lease) -> None:
        if lease.reader:
            self._tell(lease.reader, Ended(lease.number, whole=False))
        self._end(lease)

    def leave(self) -> bool:
        """Give pages back that running requests need; False if there are none."""
        for pull in self._pulls.values():
            self._fail(pull, "running requests need the pages: try again later")
            return True
        for lease in self._leases.values():
            self._revoke(lease)
            return True
        return False

    def _tell(self, peer: str, said: _Notices) -> None:
        with suppress(TransferError):  # it takes none: as if it were gone, and leases end by time
            self._transfer.notify(peer, msgspec.msgpack.encode(said))

    def drop(self, why: str) -> list[PagesPulled]:
        """Go on without the transfer, which works no more; what becomes of pulls. Raises what it
        raises where it cannot even be closed: it may still write to pages then."""
        self._transfer.close()
        pulls, self._pulls = [*self._pulls.values()], {}
        for pull in pulls:
            self._give(pull.local, pull.node)
        for lease in [*self._leases.values()]:
            self._end(lease)
        self._pages.guests = None
        return [*self._ended, *(PagesPulled(pull.token, refused=why) for pull in pulls)]

    def close(self) -> None:
        """Leave: what is under way ends, and peers see it."""
        while self.leave():
            continue
        self._transfer.close()
