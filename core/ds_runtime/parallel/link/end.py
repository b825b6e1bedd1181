"""A socket of the link between ranks: what it keeps, and who may be at its other end.

Over TCP both ends prove to each other that they know one secret. What they send is encrypted by
ZeroMQ's CURVE, with a pair of keys that follows from the secret. Nothing of a stranger gets further
than ZeroMQ.
"""

from __future__ import annotations

import hashlib
import threading
from ipaddress import ip_address
from pathlib import Path
from socket import create_server, gethostbyname
from typing import NamedTuple

import zmq
from zmq.utils import z85

from ds_runtime.common.address import is_loopback
from ds_runtime.common.patience import LinkLimits
from ds_runtime.errors import ConfigError, unreadable

_MOST_BYTES = 1 << 24  # of a message to rank 0: a hello, with its plan
_FEW = 16  # messages of one connection that wait to be read there
_OTHER_SECRET = (zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class LinkKeys(NamedTuple):
    """What all ranks have in common that know one secret, as ZeroMQ writes keys."""

    public: bytes
    secret: bytes


class Happened(NamedTuple):
    """One thing that became of a connection."""

    met: bool = False  # both ends know each other
    ended: bool = False
    refused: bool = False  # before they did
    another_secret: bool = False


class LinkEnd:
    """A socket that keeps everything sent to it. Each call needs `lock`, from whatever thread.

    closing: the end of a connection is no news any more. far: the other end is on another node.
    limits: how long it waits, and others hear nothing of it.
    Raises ConfigError where keys are given and ZeroMQ was built without CURVE.
    """

    def __init__(self, kind: int, address: str, keys: LinkKeys | None, limits: LinkLimits) -> None:
        self.closing, self.far = threading.Event(), address.startswith("tcp://")
        self.lock, self.limits = threading.Lock(), limits
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, int(limits.linger * 1000))
        if keys is not None:
            self._prove(kind, keys)
        if kind == zmq.ROUTER:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self.far and kind == zmq.ROUTER:  # strangers may reach it
            self.socket.setsockopt(zmq.RCVHWM, _FEW)
            self.socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        if self.far or kind == zmq.DEALER:
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, int(limits.sign * 1000))
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(limits.silence * 1000))
        known = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED if kind == zmq.DEALER else 0
        self._monitor = self.socket.get_monitor_socket(_FAILED | known)

    def _prove(self, kind: int, keys: LinkKeys) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                "--dist-token-file: this build of ZeroMQ has no CURVE to prove a secret with: "
                "install pyzmq from its wheel"
            )
        self.socket.curve_publickey, self.socket.curve_secretkey = keys
        if kind == zmq.ROUTER:
            self.socket.curve_server = True
        else:  # who has this key knows the secret
            self.socket.curve_serverkey = keys.public

    def say(self, data: bytes, *to: bytes) -> bool:
        """Send, and never wait: False where there is nobody. to: a ROUTER's, the name of the
        connection. ZeroMQ gives a connection up for good that speaks otherwise, as one without a
        secret does to one that has one, and would then wait for another in sending.
        """
        try:
            self.socket.send_multipart((*to, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def happened(self, milliseconds: int) -> Happened | None:
        """The next thing that became of a connection; None if there is none for so long."""
        if not self._monitor.poll(milliseconds):
            return None
        event, _ = self._monitor.recv_multipart()
        what, value = int.from_bytes(event[:2], "little"), int.from_bytes(event[2:6], "little")
        return Happened(
            met=what == zmq.EVENT_HANDSHAKE_SUCCEEDED,
            ended=what == zmq.EVENT_DISCONNECTED,
            refused=bool(what & _FAILED),
            another_secret=what == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value in _OTHER_SECRET,
        )

    def close(self) -> None:
        """Send what is unsent, for a moment, and let go. The caller's thread is the last."""
        self._let_go(self.limits.linger)

    def part(self) -> None:
        """Let go, and send nothing more."""
        self._let_go(0.0)

    def _let_go(self, seconds: float) -> None:
        self.closing.set()
        with self.lock:
            self._context.destroy(linger=int(seconds * 1000))


def numeric(address: str) -> str:
    """The same with a host's number for its name, as binding wants it. Raises ConfigError where a
    name means this machine alone, and OSError where it is none.
    """
    if not address.startswith("tcp://"):
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    found = gethostbyname(host)
    if ip_address(found).is_loopback and not is_loopback(host):
        raise ConfigError(
            f"--dist-init-addr {host}:{port}: here this name is {found} (/etc/hosts), which no "
            "other machine reaches: give the number of an address that all reach"
        )
    return f"tcp://{found}:{port}"


def secret(file: str | None) -> LinkKeys | None:
    """The keys of what is in this file; None without one. Raises ConfigError if it has nothing."""
    if file is None:
        return None
    try:
        text = Path(file).read_bytes().strip()
    except OSError as e:
        give = "a file with a long random word, the same on every machine"
        raise unreadable(f"--dist-token-file {file}", e, give) from e
    if not text:
        raise ConfigError(f"--dist-token-file {file}: is empty; write a long random word to it")
    made = hashlib.scrypt(text, salt=b"ds-runtime link", n=1 << 14, r=8, p=1, dklen=32)
    key = z85.encode(made)
    return LinkKeys(zmq.curve_public(key), key)


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens at this TCP port of this machine."""
    try:
        create_server((host, port)).close()
    except OSError:
        return False
    return True
