"""The link between rank 0 and the others, besides their collectives: who is there, and what is
next.

Rank 0 binds one ZeroMQ socket, at a file in a private folder or, where there are several nodes, at
a TCP port. Each other rank connects to it, says hello, and is told where the ranks meet, or why it
is refused. From then on it waits there for the next step, for days if need be, which a collective
may not. It looks for signs of life of rank 0, which come from a thread of ZeroMQ's own whatever a
rank waits in.

Over TCP rank 0 looks for those of the others, too, and both tell why they end: a rank that fails
tells rank 0, or whoever started it does. Rank 0 waits a moment for whoever failed before, and tells
all of the first. Where rank 0 has died, whoever started it is at its address for a moment, and
tells those who ask. On one machine whoever started the ranks sees their end.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from ds_runtime._version import __version__
from ds_runtime.common.patience import LINK_LIMITS, LinkLimits
from ds_runtime.errors import ConfigError
from ds_runtime.parallel.link.end import LinkEnd, LinkKeys, numeric

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
    the checkpoint's configuration; weights: one of parts of its tensors, where nodes have files of
    their own.
    """

    rank: int
    size: int
    plan: str
    model: str = ""
    weights: str = ""
    version: str = __version__


class Welcome(msgspec.Struct, frozen=True):
    """Where the ranks meet, an address of torch.distributed; or why they do not."""

    meet: str = ""
    refused: str = ""


class Here(msgspec.Struct, frozen=True, tag=True):
    """A rank is there, and has not decided yet. From now on it is missed where it ends, and told
    where a start is refused.
    """

    rank: int


class Why(msgspec.Struct, frozen=True, tag=True):
    """Asks whoever has taken rank 0's place why that has ended. Rank 0 itself does not answer."""


class Witness(enum.IntEnum):
    """How it is known that a rank ends: who started it saw that, rank 0 misses it, or it says so.

    What others see comes first. A rank that is killed says nothing, and breaks the connections of
    others, which say so sooner than it is seen.
    """

    SEEN = 0
    MISSED = 1
    SAID = 2


class Cause(msgspec.Struct, frozen=True, tag=True):
    """Why a rank ends."""

    known: Witness
    rank: int
    message: str


class Told(msgspec.Struct, frozen=True, tag=True):
    """What another rank answers to something that is not a step."""

    data: bytes


class Waited(msgspec.Struct, frozen=True, tag=True):
    """How long another rank waited for the others in the step of this number. Only differences
    between ranks mean something.
    """

    step: int
    seconds: float


def first_of(causes: Sequence[Cause]) -> Cause:
    """The first cause of several, which are in the order in which they reached rank 0: clocks of
    several machines differ.
    """
    return min(causes, key=lambda cause: cause.known)


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


def report(
    address: str, keys: LinkKeys | None, cause: Cause, limits: LinkLimits = LINK_LIMITS
) -> None:
    """Tell rank 0 why a rank has ended that cannot say so, as somebody else."""
    end = LinkEnd(zmq.DEALER, address, keys, limits)
    end.socket.connect(address)
    end.say(msgspec.msgpack.encode(cause))
    end.close()


def ask_why(address: str, keys: LinkKeys | None, limits: LinkLimits) -> str:
    """Why rank 0 has ended, if somebody tells in its place (`instead`) within `word`; else ""."""
    end, why = LinkEnd(zmq.DEALER, address, keys, limits), ""
    end.socket.connect(address)
    end.say(msgspec.msgpack.encode(Why()))
    if end.socket.poll(int(limits.word * 1000)):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            why = msgspec.msgpack.decode(end.socket.recv(), type=Welcome).refused
    end.part()
    return why


def instead(
    address: str, keys: LinkKeys | None, why: str, limits: LinkLimits = LINK_LIMITS
) -> None:
    """Rank 0 has ended and told nobody: be at its address for twice `word`, and tell all who come
    why. Does nothing where the address cannot be had.
    """
    end, deadline = LinkEnd(zmq.ROUTER, address, keys, limits), time.monotonic() + 2 * limits.word
    try:
        end.socket.bind(numeric(address))
    except (zmq.ZMQError, OSError, UnicodeError, ConfigError):
        return end.part()
    data = msgspec.msgpack.encode(Welcome(refused=why))
    while (left := deadline - time.monotonic()) > 0:
        if end.socket.poll(int(left * 1000)):
            name, *_ = end.socket.recv_multipart()
            end.say(data, name)
    end.close()
