"""Cached prompts that go from one engine to another.

The engine that has a prompt's pages holds them under a lease and makes an offer; whoever was given
the offer pulls them into its own prefix cache. A lease ends with time, with its reader, or where
running requests need the room, and the pages may then become others while they are read. So a
reader asks at the end whether the lease was still held, and keeps what it read only if it did.

A transfer may be a plugin's. Whatever it raises, each block is the pull's still, or free. What it
raises while a read is under way, `poll` raises: whoever is in the middle of a step continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from ds_runtime.kv.chain import page_keys
from ds_runtime.kv.prefix import Match, Node, Realm
from ds_runtime.kv.transfer.asked import PagesPulled
from ds_runtime.kv.transfer.leases import (
    LEAST,
    Done,
    Leases,
    Notices,
    Offer,
    Want,
    longest,
    tell,
)
from ds_runtime.platform.kv_transfer import CacheBlocks, Ticket, TransferError


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
    """One engine's end: what it holds for others, and what it pulls itself."""

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self._pages, self._prefix, self._transfer = leases.pages, leases.prefix, leases.transfer
        self._settle, self._now = leases.settle, leases.now
        self._raised: Exception | None = None
        self._pulls: dict[str, _Pull] = {}
        self.num_read = 0
        self._ended = list[PagesPulled]()
        self._pages.guests = self

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self.leases or self._pulls or self._ended or self._raised)

    @property
    def moves(self) -> bool:
        """Whether `poll` is to be called at once: a lease that waits for its reader is no haste."""
        return bool(self._pulls or self._ended or self._raised) or self.leases.is_read

    @property
    def num_coming(self) -> int:
        """Pages that pulls write to."""
        return sum(len(pull.local.pages) for pull in self._pulls.values())

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
        self._pulls[token] = _Pull(*given, now + longest(count), now)
        try:
            self._renew(now)
        except Exception as e:  # the read is under way
            self._raised = e

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
                pull.renew = now + max(pull.offer.seconds, LEAST) / 3
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
        reads = pull.ticket is not None
        if pull.ticket is not None:
            self._transfer.release(pull.ticket)  # until then its blocks are written to
        del self._pulls[pull.token]
        self._give(pull.local, pull.node)
        self._ended.append(PagesPulled(pull.token, refused=why))
        if reads:
            self._tell(pull.peer, Done(pull.offer.lease))

    def _give(self, blocks: CacheBlocks, node: Node) -> None:
        """Blocks of a pull, and its reference, are free again."""
        self._pages.pool.free(blocks.pages)
        if self._pages.snapshots is not None:
            for state in blocks.states:
                self._pages.snapshots.give(state)
        self._prefix.unlock(node)

    # ---- both ----

    def poll(self) -> list[PagesPulled]:
        """Continue with all that is under way; the pulls that have ended since. Raises what the
        transfer raises: `drop` it."""
        if self._raised is not None:
            raise self._raised
        polled = self._transfer.poll()
        for ticket, why in polled.failed:
            if (pull := self._pulls.get(ticket.tag)) is not None and pull.ticket == ticket:
                self._fail(pull, why)
        for peer in polled.lost:  # it may have come again, and what it tells is of then
            self._lose(peer)
        for peer, notice in self._transfer.notices():
            self._hear(peer, notice)
        for ticket in polled.finished:
            if (pull := self._pulls.get(ticket.tag)) is not None and pull.ticket == ticket:
                self._read(pull)
        self._expire(self._now())
        ended, self._ended = self._ended, []
        return ended

    def _hear(self, peer: str, notice: bytes) -> None:
        try:
            said = msgspec.msgpack.decode(notice, type=Notices)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # somebody else's words
        if isinstance(said, Want):
            self.leases.wanted(peer, said.lease)
        elif isinstance(said, Done):
            self.leases.done(peer, said.lease)
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
        self.leases.lose(peer)
        for pull in [one for one in self._pulls.values() if one.peer == peer]:
            self._fail(pull, f"peer {peer!r} left before it confirmed its pages")

    def _expire(self, now: float) -> None:
        self.leases.expire(now)
        for pull in [one for one in self._pulls.values() if now > one.until]:
            within = f"{longest(len(pull.offer.pages)):.0f} s"
            self._fail(pull, f"peer {pull.peer!r} did not give all pages within {within}")
        self._renew(now)

    def leave(self) -> bool:
        """Give pages back that running requests need; False if there are none to give."""
        held = len(self._pulls) + len(self.leases)
        try:
            if self._pulls:
                pull = next(iter(self._pulls.values()))
                self._fail(pull, "running requests need the pages: try again later")
            else:
                self.leases.leave()
        except Exception as e:  # requests are in the middle of a step
            self._raised = e
        return len(self._pulls) + len(self.leases) < held

    def _tell(self, peer: str, said: Notices) -> None:
        tell(self._transfer, peer, said)

    def drop(self, why: str) -> list[PagesPulled]:
        """Continue without the transfer, which works no more; what becomes of pulls. Raises what it
        raises where it cannot even be closed: it may still write to pages then."""
        self._transfer.close()
        self._pages.guests = None
        pulls, self._pulls = [*self._pulls.values()], {}
        for pull in pulls:
            self._give(pull.local, pull.node)
        self.leases.drop()
        return [*self._ended, *(PagesPulled(pull.token, refused=why) for pull in pulls)]

    def close(self) -> None:
        """Leave: what is under way ends, and peers see it."""
        while self.leave():
            continue
        self._transfer.close()
