"""Blocks of caches that go from one engine to another: the contract, and what its keepers share.

The engine that wants blocks reads them from the one that has them. It hands out blocks of its own
again only when `poll` has told of the read, or `release` has given it up. What a peer says of
itself is plain data, and every number in it has a bound.

Devices run later than they are told to. A block that is offered may not have been written yet, and
what wrote to a block before it was given to a read may not have run. `expose` and `read` say what a
transfer waits for. One that goes through `PageCopies` has that from there. A fabric that reaches
into the device's memory has to see to it, and must not keep its caller waiting for a peer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from ds_runtime.errors import DsRuntimeError
from ds_runtime.ops.contracts.caches import Caches, LaidGroup
from ds_runtime.platform.page_copies import LayerBlocks, PageCopies

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 << 18  # of a description, or of a notice
MOST_BLOCKS = 1 << 16  # of one read
MOST_NOTICES = 1 << 12  # that wait to be taken
_COUNT = 1 << 40

Count = Annotated[int, Meta(ge=0, le=_COUNT)]
Word = Annotated[str, Meta(max_length=64)]
Numbers = Annotated[list[Count], Meta(max_length=MOST_BLOCKS)]


class TransferError(DsRuntimeError):
    """A peer cannot be attached, or a read cannot be begun."""


class Region(msgspec.Struct, frozen=True):
    """The blocks of one layer of one group. size: bytes of one, as its layout exports it."""

    group: Word
    layer: Count
    size: Count


class Description(msgspec.Struct, frozen=True):
    """What an engine says of itself.

    kind: of the transfer; those of one kind understand each other. name: never given twice.
    origin: the root of its pages' keys (`kv.keys`). pages, states: how many blocks there are for
    either. where: the transfer's own, how to reach it.
    """

    kind: Word
    name: Word
    origin: Annotated[bytes, Meta(max_length=64)]
    pages: Count
    states: Count
    regions: Annotated[list[Region], Meta(max_length=1 << 14)]
    where: bytes = b""


class CacheBlocks(NamedTuple):
    """Blocks by their numbers. pages: of all history groups. states: of all state groups."""

    pages: Sequence[int] = ()
    states: Sequence[int] = ()


class Ticket(NamedTuple):
    """A read that was begun. number: the transfer's. tag: the reader's own word for it."""

    number: int
    tag: str


class Polled(NamedTuple):
    """What has happened to reads since the last poll. Nothing is written to their blocks any more.

    finished: reads whose blocks are all here. failed: reads with the reason. lost: names of peers
    that are gone.
    """

    finished: list[Ticket]
    failed: list[tuple[Ticket, str]]
    lost: list[str]


class KvTransfer(Protocol):
    """Moves blocks between engines. The thread that queues steps calls it. No method waits for a
    peer.
    """

    def register(self, caches: Caches, pages: int, states: int, copies: PageCopies) -> None:
        """Takes the caches that are read from and written to. pages, states: how many blocks peers
        may name. copies: the platform's way to host memory.
        """

    def describe(self) -> bytes:
        """Returns what a peer needs to attach: at most 256 KiB."""
        ...

    def attach(self, description: bytes) -> str:
        """Returns the peer's name. The peer then knows this engine, too, and either may notify the
        other. Raises TransferError for bytes that are no description, or for blocks of another
        origin.
        """
        ...

    def read(self, peer: str, local: CacheBlocks, remote: CacheBlocks, tag: str) -> Ticket:
        """Begin to copy blocks `remote` of a peer to `local`. Not a byte of `local` is written
        before all has run that is queued on the device now. Once `poll` tells of its end, all that
        is queued from then on sees what was written. Raises TransferError for blocks that are not
        there."""
        ...

    def expose(self, blocks: CacheBlocks) -> None:
        """Peers are told of these blocks next, and may read them at once: none of them is read
        before all has run that is queued on the device now."""

    def poll(self) -> Polled:
        """Continue with all that is under way, here and for peers. Called often: by an engine
        between its steps, and while it has none."""
        ...

    def notify(self, peer: str, notice: bytes) -> None:
        """Send a peer a few bytes, in order; they are lost if it is gone."""

    def notices(self) -> list[tuple[str, bytes]]:
        """(peer, bytes) that have come since the last call; none of what a peer had said before
        `poll` told of it as lost."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Give a read up, if it has not ended: nothing is written to its blocks any more."""

    def close(self) -> None:
        """Leave: peers see this engine as gone."""


class Layers:
    """The layers of all caches that blocks go between, in the order in which their bytes do."""

    def __init__(self, caches: Caches) -> None:
        self._all = [
            (laid, number, cache) for laid, made in caches.groups for number, cache in made.items()
        ]

    def __iter__(self) -> Iterator[tuple[LaidGroup, int, Tensor]]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def regions(self) -> list[Region]:
        """As a description has them."""
        return [Region(laid.group.name, n, laid.page_bytes) for laid, n, _ in self._all]

    def numbers(self, layer: int, blocks: CacheBlocks) -> Sequence[int]:
        """Those of some blocks that are one layer's."""
        return self._all[layer][0].group.blocks(blocks.pages, blocks.states)

    def size(self, layer: int) -> int:
        """Bytes of one block of one layer."""
        return self._all[layer][0].page_bytes

    def some(self, layer: int, numbers: Sequence[int], host: Tensor) -> LayerBlocks:
        """Some blocks of one layer, and host memory for them: [bytes] uint8."""
        laid, _, cache = self._all[layer]
        return LayerBlocks(cache, laid.layout, numbers, host.view(len(numbers), laid.page_bytes))


class Transfer:
    """A base for KvTransfer: its description, and the checks of messages of peers and requests of
    readers. A plugin's KvTransfer may inherit from it, but need not.

    kind: of the transfer. Engines exchange blocks only with engines of the same kind.
    """

    kind: ClassVar[str] = ""

    def __init__(self, name: str, origin: bytes) -> None:
        self.name, self.origin = name, origin
        self.layers = Layers(Caches(()))
        self._peers: dict[str, Description] = {}
        self._pages = self._states = self._count = 0

    def register(self, caches: Caches, pages: int, states: int, copies: PageCopies) -> None:
        """As KvTransfer."""
        self.layers, self._copies = Layers(caches), copies
        self._pages, self._states = pages, states

    def where(self) -> bytes:
        """How peers reach this one."""
        return b""

    def expose(self, blocks: CacheBlocks) -> None:
        """As KvTransfer, for a transfer that reads by `PageCopies`: these wait for the device."""

    def describe(self) -> bytes:
        """As KvTransfer."""
        given = self.kind, self.name, self.origin, self._pages, self._states
        return msgspec.msgpack.encode(Description(*given, self.layers.regions, self.where()))

    def admit(self, description: bytes) -> Description:
        """What a peer said of itself, if blocks may come from it. Raises TransferError."""
        if len(description) > MOST_BYTES:
            raise TransferError(
                f"a peer's description has {len(description)} bytes, the limit is {MOST_BYTES}"
            )
        try:
            said = msgspec.msgpack.decode(description, type=Description)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise TransferError(f"what a peer said of itself is no description: {e}") from e
        if said.name == self.name:
            raise TransferError(f"peer {said.name!r} is this engine itself: its pages are here")
        if said.kind != self.kind:
            raise TransferError(
                f"peer {said.name!r} moves pages by {said.kind!r}, and this engine by "
                f"{self.kind!r}: load the same plugins in both"
            )
        if said.origin != self.origin or said.regions != self.layers.regions:
            raise TransferError(
                f"peer {said.name!r}: its pages are of another model, adapter, layout, page size, "
                "dtype or salt, and mean nothing here: start both engines alike"
            )
        return said

    def ticket(self, peer: str, local: CacheBlocks, remote: CacheBlocks, tag: str) -> Ticket:
        """A new one. Raises TransferError for a read of what is not there."""
        if (said := self._peers.get(peer)) is None:
            raise TransferError(f"peer {peer!r} is not attached, or gone")
        kinds = (
            ("page", local.pages, remote.pages, self._pages, said.pages),
            ("state", local.states, remote.states, self._states, said.states),
        )
        for word, here, there, own, others in kinds:
            if len(here) != len(there) or len(here) > MOST_BLOCKS or len({*here}) < len(here):
                raise TransferError(
                    f"a read of {len(there)} {word}s to {len(here)}: give each a place of its own, "
                    f"and {MOST_BLOCKS} at most"
                )
            for which, numbers, count in (("here", here, own), ("there", there, others)):
                if wrong := [n for n in numbers if not 0 <= n < count]:
                    raise TransferError(f"{word} {wrong[0]} {which}: there are {count}")
        self._count += 1
        return Ticket(self._count, tag)

    def holds(self, blocks: CacheBlocks) -> bool:
        """Whether a peer names blocks that are here."""
        pages, states = max(blocks.pages, default=-1), max(blocks.states, default=-1)
        return pages < self._pages and states < self._states


def check_notice(notice: bytes) -> None:
    """Raises TransferError for one that is too long."""
    if len(notice) > MOST_BYTES:
        raise TransferError(f"a notice of {len(notice)} bytes, the limit is {MOST_BYTES}")
