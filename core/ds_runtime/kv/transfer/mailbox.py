"""Messages between engines: one socket that all peers write to, and one to each of them.

Over a Unix socket who may enter its folder is let in. Over TCP ZeroMQ's CURVE encrypts, and the
description of an engine holds its key: who was not given the description cannot speak to it.

Two engines that have met are a *pair of epochs*, one of each, new whenever either opens a line. All
that they say has both in front. Where one of them has let go of the other, or has begun again, what
the other still says is of a pair that is no more. It is not even decoded, and who said it is told.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
import zmq
from msgspec import Meta

from ds_runtime.platform.kv_transfer import TransferError

PATIENCE = 5.0  # seconds that a peer has for its first word
_SIGN = 1000  # milliseconds between signs of life, which a thread of ZeroMQ's own gives
_SILENCE = 4000  # and after which there is nobody
_LOOK = 0.05  # seconds between looks at connections
_FEW = 256  # messages that one connection holds, and that are read at a time
_EPOCH = 16  # bytes: a number that only rises in one life of an engine, and a random one
_NONE = bytes(_EPOCH)  # of a peer that has not greeted yet
_WHY = 500  # bytes
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED  # of a connection, and of one that never was


class Where(msgspec.Struct, frozen=True):
    """How an engine is reached. key: CURVE's public one, "" for a Unix socket."""

    address: Annotated[str, Meta(max_length=256, pattern=r"^(ipc:///|tcp://).")]
    key: Annotated[str, Meta(pattern=r"^(.{40})?$")] = ""


Bytes = bytes | memoryview


class Heard(NamedTuple):
    """What somebody said. epoch: the speaker's; answers: the one of this engine that it speaks to,
    all zero for one that it has not heard of. data: a second part, of bytes. by: the connection.
    """

    peer: str
    message: Any
    data: Bytes
    epoch: bytes
    answers: bytes
    by: bytes


@dataclass(slots=True)
class _Line:
    """The socket to one peer, and what tells of its end. own, theirs: the pair of epochs. waiting:
    what is to be said once it has greeted."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    since: float
    own: bytes
    theirs: bytes = _NONE
    broken: str = ""
    waiting: list[list[Bytes]] = field(default_factory=list)


class Mailbox:
    """name: this engine's. address: where to listen, "ipc://FILE" or "tcp://HOST:PORT", whose port
    may be *. most: bytes of a part of a message. greeting, kinds: the type that makes a pair, and
    all types. Raises TransferError where the address cannot be had.
    """

    def __init__(self, name: str, address: str, most: int, greeting: type, kinds: Any) -> None:
        self._name, self._most, self._lines = name, most, dict[str, _Line]()
        self._greeting, self._decoder = greeting, msgspec.msgpack.Decoder(kinds)
        self._count, self._looked = 0, 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = zmq.curve_keypair() if address.startswith("tcp://") else None
        self._inbox = self._socket(zmq.ROUTER)
        if self._keys is not None:
            self._inbox.curve_server = True
            self._inbox.curve_publickey, self._inbox.curve_secretkey = self._keys
        try:
            self._inbox.bind(address)
        except zmq.ZMQError as e:
            self._context.destroy(linger=0)
            raise TransferError(f"{address}: cannot be had for the transfer of pages: {e}") from e

    @property
    def where(self) -> Where:
        """How peers reach it."""
        key = "" if self._keys is None else self._keys[0].decode()
        return Where(self._inbox.getsockopt_string(zmq.LAST_ENDPOINT), key)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set_hwm(_FEW)
        made.setsockopt(zmq.MAXMSGSIZE, self._most)
        made.setsockopt(zmq.HEARTBEAT_IVL, _SIGN)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.HANDSHAKE_IVL, int(PATIENCE * 1000))
        made.setsockopt(zmq.CONNECT_TIMEOUT, int(PATIENCE * 1000))
        made.setsockopt(zmq.RECONNECT_IVL, -1)  # what was sent meanwhile would be missing
        return made

    def open(self, peer: str, where: Where, hello: msgspec.Struct, answers: bytes = _NONE) -> None:
        """Connect to a peer and greet it. answers: its epoch, if it has greeted first. `lost` tells
        if it says nothing."""
        self._count += 1
        own = self._count.to_bytes(8) + secrets.token_bytes(_EPOCH - 8)
        socket = self._socket(zmq.DEALER)
        # A number of its own: the end of an earlier connection may not have been seen there yet.
        socket.setsockopt(zmq.IDENTITY, f"{self._name}.{self._count}".encode())
        try:
            if where.key:
                socket.curve_serverkey = where.key.encode()
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            monitor = socket.get_monitor_socket(_ENDS)
            socket.connect(where.address)
        except (zmq.ZMQError, ValueError) as e:
            socket.disable_monitor()
            socket.close()
            raise TransferError(f"peer {peer!r} at {where.address}: {e}") from e
        line = self._lines[peer] = _Line(socket, monitor, time.monotonic(), own, answers)
        _say(line, [own + answers, msgspec.msgpack.encode(hello)])

    def epochs(self, peer: str) -> tuple[bytes, bytes]:
        """This engine's and the peer's; empty for one that is none."""
        line = self._lines.get(peer)
        return (b"", b"") if line is None else (line.own, line.theirs)

    def has_met(self, peer: str) -> bool:
        """Whether this one and a peer are a pair."""
        return peer in self._lines and self._lines[peer].theirs != _NONE

    def meet(self, peer: str, epoch: bytes) -> None:
        """A peer has greeted: the two are a pair, and it is told what waited for that."""
        line = self._lines[peer]
        line.theirs, waiting, line.waiting = epoch, line.waiting, []
        for parts in waiting:
            _say(line, [line.own + epoch, *parts])

    def send(self, peer: str, message: msgspec.Struct, data: Bytes = b"") -> None:
        """Never waits: a peer that takes nothing is lost."""
        if (line := self._lines.get(peer)) is None or line.broken:
            return
        parts = [msgspec.msgpack.encode(message), data]
        if line.theirs != _NONE:
            _say(line, [line.own + line.theirs, *parts])
        elif len(line.waiting) < _FEW:
            line.waiting.append(parts)
        else:
            line.broken = "takes nothing that it is sent: it has not answered"

    def receive(self) -> Iterator[Heard]:
        """What has come, in order: greetings of anybody, and else what peers say to this epoch. Who
        speaks to another is told, and a peer that says what is no message is lost."""
        for _ in range(_FEW):
            try:
                by, *parts = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = by.bytes.decode(errors="replace").rpartition(".")[0]
            pair = parts[0].bytes if parts else b""
            epoch, answers = pair[:_EPOCH], pair[_EPOCH:]
            line = self._lines.get(peer)
            known = line is not None and (answers, epoch) == (line.own, line.theirs)
            found: Any = None
            if len(answers) == _EPOCH and len(parts) in (2, 3):
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    found = self._decode(parts[1].buffer, known)
            data = parts[2].buffer if len(parts) == 3 else b""
            if found is not None:
                yield Heard(peer, found, data, epoch, answers, by.bytes)
            elif known and line is not None:
                line.broken = "sent what is no message"
            elif len(answers) == _EPOCH:
                self.refuse(by.bytes, pair, "it does not know this engine, or no more")

    def _decode(self, said: Bytes, known: bool) -> Any:
        """None for what a stranger says beside greetings."""
        found = self._decoder.decode(said)
        return found if known or isinstance(found, self._greeting) else None

    def refuse(self, by: bytes, pair: bytes, why: str) -> None:
        """Tell who spoke of this pair that it is none, by the connection that it spoke by."""
        with suppress(zmq.ZMQError):  # it takes nothing, or has gone
            self._inbox.send_multipart([by, pair, why.encode()[:_WHY]], zmq.NOBLOCK)

    def lost(self) -> list[tuple[str, str]]:
        """Peers that are gone, and why: `drop` them."""
        gone, now = list[tuple[str, str]](), time.monotonic()
        looks = now >= self._looked + _LOOK  # engines ask between steps
        self._looked = now if looks else self._looked
        for peer, line in self._lines.items():
            why = line.broken or _refused(line)
            if not why and looks and line.monitor.poll(0):
                why = "has left, or cannot be reached any more"
            if not why and line.theirs == _NONE and now > line.since + PATIENCE:
                why = f"did not answer within {PATIENCE:.0f} s"
            if why:
                gone.append((peer, why))
        return gone

    def drop(self, peer: str) -> None:
        """Let go of a peer, if it is one."""
        if (line := self._lines.pop(peer, None)) is not None:
            line.socket.disable_monitor()
            line.monitor.close()
            line.socket.close()

    def close(self) -> None:
        """Leave."""
        for peer in list(self._lines):
            self.drop(peer)
        self._context.destroy(linger=0)


def _say(line: _Line, parts: list[Bytes]) -> None:
    try:
        line.socket.send_multipart(parts if len(parts[-1]) else parts[:-1], zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as e:
        line.broken = f"takes nothing that it is sent: {e}"


def _refused(line: _Line) -> str:
    """Why the peer will not have this pair, if it said so."""
    for _ in range(_FEW):
        try:
            pair, *why = line.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        if pair == line.own + line.theirs:
            said = b" ".join(why)[:_WHY].decode(errors="replace")
            return f"refuses: {said}"
    return ""
