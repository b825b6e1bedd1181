"""What goes between two `SocketTransfer`: their words, and blocks in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from torch import Tensor

from ds_runtime.kv.transfer.shared_memory import Offered
from ds_runtime.platform.kv_transfer import MOST_BYTES, CacheBlocks, Count, Layers, Numbers
from ds_runtime.platform.page_copies import LayerBlocks

PIECE = 1 << 22  # bytes
SLOTS = 8  # pieces that one reader has not taken yet


class Greeting(msgspec.Struct, tag=True, frozen=True):
    """The first word to a peer, once for each pair of epochs. memory: for pieces read here."""

    description: Annotated[bytes, Meta(max_length=MOST_BYTES)]
    memory: Offered | None = None


class Read(msgspec.Struct, tag=True, frozen=True):
    """Blocks that are wanted. shared: pieces are found in the memory that was offered."""

    number: Count
    pages: Numbers
    states: Numbers
    shared: bool


class PageBytes(msgspec.Struct, tag=True, frozen=True):
    """A piece is in its slot, or comes after this."""

    number: Count
    index: Count
    slot: Annotated[int, Meta(ge=0, lt=SLOTS)]


class Taken(msgspec.Struct, tag=True, frozen=True):
    """A slot may be filled again."""

    slot: Annotated[int, Meta(ge=0, lt=SLOTS)]


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """No more of this read is wanted."""

    number: Count


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """No more of this read will come."""

    number: Count
    why: Annotated[str, Meta(max_length=500)]


class Still(msgspec.Struct, tag=True, frozen=True):
    """The sender still has something open. Who does not know of it answers that."""


class Notice(msgspec.Struct, tag=True, frozen=True):
    """Of the engine's own."""

    data: Annotated[bytes, Meta(max_length=MOST_BYTES)]


Words = Greeting | Read | PageBytes | Taken | Cancel | Stopped | Still | Notice


class BlockRange(NamedTuple):
    """Blocks [first, last) of one layer's."""

    layer: int
    first: int
    last: int


def pieces_of(layers: Layers, blocks: CacheBlocks, most: int) -> Iterator[list[BlockRange]]:
    """All blocks of all layers in pieces of `most` bytes at most: the same at both ends."""
    piece, room = list[BlockRange](), most
    for layer in range(len(layers)):
        first, size = 0, layers.size(layer)
        left = len(layers.numbers(layer, blocks))
        while left:
            if not (count := min(left, room // size)):
                yield piece
                piece, room = [], most
                continue
            piece.append(BlockRange(layer, first, first + count))
            first, left, room = first + count, left - count, room - count * size
    if piece:
        yield piece


def placed(
    layers: Layers, piece: list[BlockRange], blocks: CacheBlocks, host: Tensor
) -> list[LayerBlocks] | None:
    """A piece's blocks and their bytes, one after the other; None if these are fewer."""
    found, at = list[LayerBlocks](), 0
    for layer, first, last in piece:
        end = at + (last - first) * layers.size(layer)
        if end > len(host):
            return None
        numbers = layers.numbers(layer, blocks)[first:last]
        found.append(layers.some(layer, numbers, host[at:end]))
        at = end
    return found
