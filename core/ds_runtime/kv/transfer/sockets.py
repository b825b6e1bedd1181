"""KvTransfer between processes: words by sockets, bytes by memory that both share, else by sockets.

Who has the blocks exports them into slots, a piece at a time, tells the reader of each, and fills a
slot again once the reader has taken it. Both work in their `poll`, so that a read continues as fast
as both engines come by.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from ds_runtime.kv.transfer.mailbox import Bytes, Heard, Mailbox, Where
from ds_runtime.kv.transfer.pieces import (
    PIECE,
    SLOTS,
    BlockRange,
    Cancel,
    Greeting,
    Notice,
    PageBytes,
    Read,
    Still,
    Stopped,
    Taken,
    Words,
    pieces_of,
    placed,
)
from ds_runtime.kv.transfer.shared_memory import Slots, open_shared, share
from ds_runtime.ops.contracts.caches import Caches
from ds_runtime.platform.kv_transfer import (
    MOST_BLOCKS,
    MOST_BYTES,
    MOST_NOTICES,
    CacheBlocks,
    Description,
    Polled,
    Ticket,
    Transfer,
    TransferError,
    check_notice,
)
from ds_runtime.platform.page_copies import Copying, PageCopies

MOST_PEERS = 64
MOST_READS = 64  # of one peer
_STILL = 1.0  # seconds between signs to peers that something is open with


@dataclass(slots=True)
class _Giving:
    """A peer's read of blocks that are here."""

    number: int
    blocks: CacheBlocks
    shared: bool
    pieces: Iterator[list[BlockRange]]
    index: int = 0


@dataclass(slots=True)
class _Saving:
    """A piece that is on its way to host memory, and from there into a shared slot."""

    piece: PageBytes
    host: Tensor
    shared: Tensor | None
    layers: int
    copying: Copying


@dataclass(slots=True)
class _Reading:
    """A read of a peer's blocks. next: the piece that is due, None behind the last."""

    ticket: Ticket
    local: CacheBlocks
    remote: CacheBlocks
    pieces: Iterator[list[BlockRange]]
    index: int = 0
    next: list[BlockRange] | None = None
    landing: deque[tuple[int, int, Copying]] = field(default_factory=deque)  # slot, layers

    def finish(self) -> None:
        """Return once nothing of it writes to a page any more."""
        for _, _, copying in self.landing:
            copying.finish()


@dataclass(slots=True)
class _Peer:
    """A peer in one pair of epochs: what is open with it ends with that. own: slots for what it
    reads here; theirs: those of what is read there, where they can be had."""

    own: Slots | None
    theirs: Slots | None = None
    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))
    buffers: dict[int, Tensor] = field(default_factory=dict)
    serving: deque[_Giving] = field(default_factory=deque)
    saving: deque[_Saving] = field(default_factory=deque)
    reading: dict[int, _Reading] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether anything is under way."""
        return bool(self.reading or self.serving or self.saving)

    def finish(self) -> None:
        """Return once no copy of it writes to a page or a slot any more."""
        for saved in self.saving:
            saved.copying.finish()
        for read in self.reading.values():
            read.finish()


class SocketTransfer(Transfer):
    """address: where to listen, as `Mailbox`. share_memory: where both ends are on one machine."""

    kind = "socket"

    def __init__(self, origin: bytes, address: str, share_memory: bool = True) -> None:
        super().__init__(secrets.token_hex(16), origin)
        self._address, self._shares, self._size = address, share_memory, PIECE
        self._open: dict[str, _Peer] = {}
        self._notices: deque[tuple[str, bytes]] = deque()
        self._polled = Polled([], [], [])
        self._still = 0.0

    def register(self, caches: Caches, pages: int, states: int, copies: PageCopies) -> None:
        """As KvTransfer. Raises TransferError where the address cannot be had."""
        super().register(caches, pages, states, copies)
        self._locked = copies.buffer(1, 1).is_pinned()  # then shared memory is slow for the device
        self._size = max(PIECE, *(region.size for region in self.layers.regions), 0)
        most = self._size + 16 * MOST_BLOCKS + MOST_BYTES
        self._mail = Mailbox(self.name, self._address, most, Greeting, Words)

    def where(self) -> bytes:
        """As Transfer."""
        return msgspec.msgpack.encode(self._mail.where)

    def attach(self, description: bytes) -> str:
        """As KvTransfer."""
        said = self.admit(description)
        if said.name not in self._peers:
            self._meet(said)
        return said.name

    def _meet(self, said: Description, *answers: bytes) -> None:
        """Open a line to a peer. answers: its epoch, if it has greeted first."""
        if len(self._peers) >= MOST_PEERS:
            raise TransferError(f"{MOST_PEERS} peers are attached: that is the limit")
        try:
            where = msgspec.msgpack.decode(said.where, type=Where)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise TransferError(f"peer {said.name!r} does not say where it is: {e}") from e
        own = share(self._size, SLOTS) if self._shares else None
        hello = Greeting(self.describe(), own.offered if own else None)
        self._mail.open(said.name, where, hello, *answers)
        self._peers[said.name], self._open[said.name] = said, _Peer(own)

    def read(self, peer: str, local: CacheBlocks, remote: CacheBlocks, tag: str) -> Ticket:
        """As KvTransfer."""
        ticket, there = self.ticket(peer, local, remote, tag), self._open[peer]
        pieces = pieces_of(self.layers, local, self._size)
        read = _Reading(ticket, local, remote, pieces, next=next(pieces, None))
        there.reading[ticket.number] = read
        if self._mail.has_met(peer):
            self._ask(peer, there, read)
        return ticket

    def _ask(self, name: str, peer: _Peer, read: _Reading) -> None:
        shared = peer.theirs is not None
        pages, states = list(read.remote.pages), list(read.remote.states)
        self._mail.send(name, Read(read.ticket.number, pages, states, shared))

    def poll(self) -> Polled:
        """As KvTransfer."""
        for heard in self._mail.receive():
            self._take(heard)
        for name, why in self._mail.lost():
            self._lose(name, why)
        now = time.monotonic()
        if signs := now >= self._still + _STILL:
            self._still = now
        for name, peer in self._open.items():
            if signs and peer.is_open and self._mail.has_met(name):
                self._mail.send(name, Still())
            self._serve(name, peer)
            for read in list(peer.reading.values()):
                self._land(name, peer, read)
        polled, self._polled = self._polled, Polled([], [], [])
        return polled

    # ---- words of peers ----

    def _take(self, heard: Heard) -> None:
        name, message = heard.peer, heard.message
        if isinstance(message, Greeting):
            return self._greeted(heard, message)
        peer = self._open[name]
        if isinstance(message, Read):
            self._asked(name, peer, message)
        elif isinstance(message, PageBytes):
            self._come(name, peer, message, heard.data)
        elif isinstance(message, Taken):
            if message.slot not in peer.free and all(
                s.piece.slot != message.slot for s in peer.saving
            ):
                peer.free.append(message.slot)
        elif isinstance(message, Cancel):
            peer.serving = deque(s for s in peer.serving if s.number != message.number)
        elif isinstance(message, Stopped):
            if (read := peer.reading.get(message.number)) is not None:
                self._fail(name, peer, read, f"peer {name!r}: {message.why}")
        elif isinstance(message, Still):
            return  # it is known
        elif len(self._notices) < MOST_NOTICES:
            self._notices.append((name, message.data))
        else:
            self._lose(name, f"told more than {MOST_NOTICES} notices that nobody took")

    def _greeted(self, heard: Heard, message: Greeting) -> None:
        """A pair is made. One that there was with this peer ends: it has begun anew, or let go of
        this engine while its words were under way."""
        name = heard.peer
        own, known = self._mail.epochs(name)
        if any(heard.answers) and heard.answers != own:
            return  # it answers a greeting of a pair that is no more here, either
        try:
            said = self.admit(message.description)
            if said.name != name:
                raise TransferError(f"it speaks as {name!r}, and says that it is {said.name!r}")
            if heard.epoch <= known:
                return  # one of its earlier lines, or the same again
            if self._mail.has_met(name):
                self._lose(name, "was started again")
                if heard.answers == own:
                    return  # it does not await another: what it says next it is told
            if name not in self._open:
                self._meet(said, heard.epoch)
        except TransferError as e:
            return self._mail.refuse(heard.by, heard.epoch + heard.answers, str(e))
        self._mail.meet(name, heard.epoch)
        peer = self._open[name]
        if message.memory is not None and self._shares:
            peer.theirs = open_shared(message.memory, self._size, SLOTS)
        for read in peer.reading.values():
            self._ask(name, peer, read)

    def _asked(self, name: str, peer: _Peer, message: Read) -> None:
        blocks, why = CacheBlocks(message.pages, message.states), ""
        if not self.holds(blocks):
            why = f"there are {self._pages} pages and {self._states} states"
        elif len(peer.serving) >= MOST_READS:
            why = f"{MOST_READS} reads are under way: that is the limit"
        elif message.shared and peer.own is None:
            why = "it shares no memory"
        if why:
            return self._mail.send(name, Stopped(message.number, why))
        pieces = pieces_of(self.layers, blocks, self._size)
        peer.serving.append(_Giving(message.number, blocks, message.shared, pieces))

    # ---- blocks that peers read here ----

    def _serve(self, name: str, peer: _Peer) -> None:
        while peer.serving and peer.free:
            read = peer.serving[0]
            if (piece := next(read.pieces, None)) is None:
                peer.serving.popleft()
                continue
            slot = peer.free.pop()
            shared = peer.own[slot] if read.shared and peer.own else None
            host = self._buffer(peer, slot) if shared is None or self._locked else shared
            found = placed(self.layers, piece, read.blocks, host)
            assert found is not None, "a piece is larger than its slot"
            length = sum(one.host.numel() for one in found)
            said, copying = PageBytes(read.number, read.index, slot), self._copies.save(found)
            peer.saving.append(_Saving(said, host[:length], shared, len(found), copying))
            read.index += 1
        while peer.saving and peer.saving[0].copying.ended(peer.saving[0].layers - 1):
            saved = peer.saving.popleft()
            data = b"" if saved.shared is not None else saved.host.numpy().tobytes()
            if saved.shared is not None and self._locked:
                saved.shared[: len(saved.host)].copy_(saved.host)
            self._mail.send(name, saved.piece, data)

    def _buffer(self, peer: _Peer, slot: int) -> Tensor:
        if slot not in peer.buffers:
            peer.buffers[slot] = self._copies.buffer(1, self._size)[0]
        return peer.buffers[slot]

    # ---- blocks that are read from peers ----

    def _come(self, name: str, peer: _Peer, message: PageBytes, data: Bytes) -> None:
        read = peer.reading.get(message.number)
        if read is None:  # it was given up
            return self._mail.send(name, Taken(message.slot))
        host = peer.theirs[message.slot] if peer.theirs else _bytes(data)
        if self._locked:
            host = self._copies.buffer(1, len(host))[0].copy_(host)
        due, found = read.next, None
        if due is not None and message.index == read.index:
            found = placed(self.layers, due, read.local, host)
        if found is None:
            self._mail.send(name, Taken(message.slot))
            return self._fail(name, peer, read, f"peer {name!r} sent another piece than was due")
        read.landing.append((message.slot, len(found), self._copies.load(found)))
        read.next, read.index = next(read.pieces, None), read.index + 1

    def _land(self, name: str, peer: _Peer, read: _Reading) -> None:
        while read.landing and read.landing[0][2].ended(read.landing[0][1] - 1):
            slot, _, copying = read.landing.popleft()
            copying.finish()
            self._mail.send(name, Taken(slot))
        if not read.landing and read.next is None:
            del peer.reading[read.ticket.number]
            self._polled.finished.append(read.ticket)

    def _fail(self, name: str, peer: _Peer, read: _Reading, why: str) -> None:
        self._give_up(name, peer, read)
        self._polled.failed.append((read.ticket, why))

    def _give_up(self, name: str, peer: _Peer, read: _Reading) -> None:
        read.finish()
        del peer.reading[read.ticket.number]
        self._mail.send(name, Cancel(read.ticket.number))
        for slot, _, _ in read.landing:
            self._mail.send(name, Taken(slot))

    def _lose(self, name: str, why: str) -> None:
        peer = self._open[name]
        peer.finish()
        self._mail.drop(name)
        del self._open[name], self._peers[name]
        for read in peer.reading.values():
            self._polled.failed.append((read.ticket, f"peer {name!r} {why}"))
        self._notices = deque(said for said in self._notices if said[0] != name)
        self._polled.lost.append(name)

    def notify(self, peer: str, notice: bytes) -> None:
        """As KvTransfer."""
        check_notice(notice)
        self._mail.send(peer, Notice(notice))

    def notices(self) -> list[tuple[str, bytes]]:
        """As KvTransfer."""
        come, self._notices = list(self._notices), deque()
        return come

    def release(self, ticket: Ticket) -> None:
        """As KvTransfer."""
        for name, peer in self._open.items():
            if (read := peer.reading.get(ticket.number)) is not None:
                self._give_up(name, peer, read)

    def close(self) -> None:
        """As KvTransfer."""
        for peer in self._open.values():
            peer.finish()
        self._open.clear()
        self._peers.clear()
        self._mail.close()


def _bytes(data: Bytes) -> Tensor:
    """[length] uint8, of its own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
