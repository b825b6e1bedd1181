"""The link between rank 0 and the others, beside their collectives: who is there, and what is next.

Rank 0 binds one ZeroMQ socket, at a file in a private folder or, where there are several nodes, at
a TCP port. Each other rank connects to it, says hello, and is told where the ranks meet, or why it
is refused. From then on it waits there for the next step, for days if need be, which a collective
may not. It looks for signs of life of rank 0, which come from a thread of ZeroMQ's own whatever a
rank waits in.

Over TCP rank 0 looks for those of the others, too, and both tell why they end: a rank that fails
tells rank 0, or whoever started it does; rank 0 waits a moment for whoever failed before, and tells
all of the first. On one machine whoever started the ranks sees their end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from ds_runtime._version import __version__
from ds_runtime.parallel.link.end import LinkEnd, LinkKeys

LEAVE, BYE, SIGN_OF_LIFE, ENDS = b"", b",", b".", b"!"
"""What rank 0 says beside steps: others are to leave; it has left; it lives; all end, and behind it
stands why.
"""
LEFT = b""
"""What another rank says that has left."""

Lost = Callable[[str], None]
"""Takes why the ranks end, in a thread of its own."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """What a rank says of itself. plan: all that must be decided alike, as JSON; model: a digest of
    the checkpoint's configuration.
    """

    rank: int
    size: int
    plan: str
    model: str = ""
    version: str = __version__


class Welcome(msgspec.Struct, frozen=True):
    """Where the ranks meet, an address of torch.distributed; or why they do not."""

    meet: str = ""
    refused: str = ""


class Cause(msgspec.Struct, frozen=True, order=True, tag=True):
    """Why a rank ends. when: in seconds since 1970, 0 for one that others saw end. The least of
    several is the first.
    """

    when: float
    rank: int
    message: str


class Told(msgspec.Struct, frozen=True, tag=True):
    """What another rank answers to something that is not a step."""

    data: bytes


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank as sentences name it: "rank 3", "rank 3 on node 1 (10.0.0.2)"."""

    rank: int
    per_node: int
    peer: str = ""

    def __str__(self) -> str:
        if not self.peer:
            return f"rank {self.rank}"
        return f"rank {self.rank} on node {self.rank // self.per_node} ({self.peer})"


def report(address: str, keys: LinkKeys | None, cause: Cause) -> None:
    """Tell rank 0 why a rank has ended that cannot say so, as somebody else."""
    end = LinkEnd(zmq.DEALER, address, keys)
    end.socket.connect(address)
    end.socket.send(msgspec.msgpack.encode(cause))
    end.close()
