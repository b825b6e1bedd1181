"""A relay between a client and a server that keeps what the client sends, byte by byte.

Bytes pass as they are. Clients send one request after the other on a connection, and the next once
they have the answer, so that the answer that begins is the last request's.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ID = re.compile(rb'"id": ?"(resp_[0-9a-f]+)"')


@dataclass
class Sent:
    """One request. status: of the answer. made: the id of the response that it made, which later
    requests may name."""

    use: str
    raw: bytearray = field(default_factory=bytearray)
    status: int | None = None
    made: str | None = None

    def take(self, data: bytes) -> bytes:
        """What is left of `data` once this request is whole, by the length that its head says."""
        self.raw += data
        head, end, body = self.raw.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        more = len(body) - (int(length[1]) if length else 0) if end else 0
        if more <= 0:
            return b""
        del self.raw[-more:]
        return data[-more:]


class Relay:
    """Listens on `url`, passes everything to `target` and back. use: what requests are for now."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = parts.hostname, parts.port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.sent: list[Sent] = []
        self.use = ""
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No more connections, and an end to those that are open."""
        for one in (self._socket, *list(self._open)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                server = socket.create_connection(self._target)
                self._open |= {client, server}
                talk = _Talk(self, client, server)
                for pump in (talk.up, talk.down):
                    threading.Thread(target=pump, daemon=True).start()


class _Talk:
    def __init__(self, relay: Relay, client: socket.socket, server: socket.socket) -> None:
        self._relay, self._client, self._server = relay, client, server
        self._now: Sent | None = None

    def up(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(1 << 16):
                rest = data if self._now is None else self._now.take(data)
                while rest:
                    self._now = Sent(self._relay.use)
                    self._relay.sent.append(self._now)
                    rest = self._now.take(rest)
                self._server.sendall(data)
        self._end(self._server)

    def down(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(1 << 16):
                now = self._now
                if now is not None and now.status is None:
                    now.status = int(data.split(b" ", 2)[1])
                if now is not None and now.made is None and (found := _ID.search(data)):
                    now.made = found[1].decode()
                self._client.sendall(data)
        self._end(self._client)

    @staticmethod
    def _end(other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)
