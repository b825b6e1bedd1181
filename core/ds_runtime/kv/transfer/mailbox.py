"""Messages between engines: one socket that all peers write to, and one to each of them.

Over a Unix socket who may enter its folder is let in. Over TCP ZeroMQ's CURVE encrypts, and the
description of an engine holds its key: who was not given the description cannot speak to it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta

from ds_runtime.platform.kv_transfer import TransferError

PATIENCE = 5.0  # seconds that a peer has for its first word
_SIGN = 1000  # milliseconds between signs of life, which a thread of ZeroMQ's own gives
_SILENCE = 4000  # and after which there is nobody
_LOOK = 0.05  # seconds between looks at connections
_FEW = 256  # messages that one connection holds, and that are read at a time


class Where(msgspec.Struct, frozen=True):
    """How an engine is reached. key: CURVE's public one, "" for a Unix socket."""

    address: Annotated[str, Meta(max_length=256, pattern=r"^(ipc:///|tcp://).")]
    key: Annotated[str, Meta(pattern=r"^(.{40})?$")] = ""


@dataclass(slots=True)
class _Line:
    """The socket to one peer, and what tells of its end. heard: the peer has spoken."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    since: float
    heard: bool = False
    broken: str = ""


class Mailbox:
    """name: this engine's. address: where to listen, "ipc://FILE" or "tcp://HOST:PORT", whose port
    may be *. most: bytes of a message. Raises TransferError where the address cannot be had.
    """

    def __init__(self, name: str, address: str, most: int) -> None:
        self._name, self._most, self._lines = name, most, dict[str, _Line]()
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
        return made

    def open(self, peer: str, where: Where, heard: bool = False) -> None:
        """Connect to a peer. Unless it was heard already, `lost` tells if it says nothing."""
        self._count += 1
        socket = self._socket(zmq.DEALER)
        # A number of its own: the end of an earlier connection may not have been seen there yet.
        socket.setsockopt(zmq.IDENTITY, f"{self._name}.{self._count}".encode())
        try:
            if where.key:
                socket.curve_serverkey = where.key.encode()
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.connect(where.address)
        except (zmq.ZMQError, ValueError) as e:
            socket.disable_monitor()
            socket.close()
            raise TransferError(f"peer {peer!r} at {where.address}: {e}") from e
        self._lines[peer] = _Line(socket, monitor, time.monotonic(), heard)

    def send(self, peer: str, message: msgspec.Struct) -> None:
        """Never waits: a peer that takes nothing is lost."""
        if (line := self._lines.get(peer)) is None or line.broken:
            return
        try:
            line.socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as e:
            line.broken = f"takes nothing that it is sent: {e}"

    def receive(self, kinds: Any) -> list[tuple[str, Any]]:
        """(sender, message) of what has come, in order: messages of `kinds`. A sender that is no
        peer yet may be anybody; a peer that sends something else is lost."""
        found = list[tuple[str, Any]]()
        for _ in range(_FEW):
            try:
                name, *data = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            peer = name.decode(errors="replace").rpartition(".")[0]
            line = self._lines.get(peer)
            try:
                found.append((peer, msgspec.msgpack.decode(b"".join(data), type=kinds)))
                if line is not None:
                    line.heard = True
            except (msgspec.DecodeError, UnicodeDecodeError) as e:
                if line is not None:
                    line.broken = f"sent what is no message: {e}"
        return found

    def lost(self) -> list[tuple[str, str]]:
        """Peers that are gone, and why; they are peers no more."""
        gone, now = list[tuple[str, str]](), time.monotonic()
        looks = now >= self._looked + _LOOK  # engines ask between steps
        self._looked = now if looks else self._looked
        for peer, line in self._lines.items():
            why = line.broken
            if not why and looks and line.monitor.poll(0):
                why = "has left, or cannot be reached any more"
            if not why and not line.heard and now > line.since + PATIENCE:
                why = f"did not answer within {PATIENCE:.0f} s"
            if why:
                gone.append((peer, why))
        for peer, _ in gone:
            self.drop(peer)
        return gone

    def drop(self, peer: str) -> None:
        """Let go of a peer."""
        line = self._lines.pop(peer)
        line.socket.disable_monitor()
        line.monitor.close()
        line.socket.close()

    def close(self) -> None:
        """Leave."""
        for peer in list(self._lines):
            self.drop(peer)
        self._context.destroy(linger=0)
