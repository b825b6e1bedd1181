"""The link between rank 0 and the others, beside their collectives: who is there, and what is next.

Rank 0 binds one ZeroMQ socket, at a file in a private folder or, where there are several nodes, at
a TCP port. Each other rank connects to it, says hello, and is told where the ranks meet, or why it
is refused. From then on it waits there for the next step, for days if need be, which a collective
may not. It looks for signs of life of rank 0, which come from a thread of ZeroMQ's own whatever a
rank waits in; over TCP so does rank 0 for those of the others, so that the end of a node is seen
within seconds. On one machine whoever started the ranks sees their end.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import create_server, gethostbyname

import msgspec
import zmq

from ds_runtime._version import __version__
from ds_runtime.errors import ConfigError, EngineDeadError

_LEAVE = b""
_SIGN = 1000  # milliseconds between signs of life
_SILENCE = 4000  # and after which there is nobody
_LOOK = 100
_MOST_BYTES = 1 << 24  # of a hello, with its plan
_FEW = 16  # messages of one connection that wait to be read
_GRACE = 1.0  # seconds for the word to leave to be read
_GRACE_HERE = 2.0  # on one machine, whose ranks end with the process that started them

Lost = Callable[[str], None]
"""Takes why the other end is gone, in a thread of its own."""


class Hello(msgspec.Struct, frozen=True):
    """What a rank says of itself. plan: all that must be decided alike, as JSON; model: a digest of
    the checkpoint's configuration; token: a digest of the secret that nodes share, "" without.
    """

    rank: int
    size: int
    plan: str
    model: str = ""
    token: str = ""
    version: str = __version__


class Welcome(msgspec.Struct, frozen=True):
    """Where the ranks meet, an address of torch.distributed; or why they do not."""

    meet: str = ""
    refused: str = ""


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


Differ = Callable[[str, str], list[str]]
"""Says how two plans differ: that of rank 0, and another's."""


class Leader:
    """Rank 0's end. own: its hello; differ: compares plans; per_node: ranks of a node. Raises
    ConfigError where the address cannot be had.
    """

    def __init__(self, address: str, own: Hello, differ: Differ, per_node: int = 0) -> None:
        self._own, self._differ, self._per_node = own, differ, per_node
        self._ranks: dict[bytes, int] = {}  # by the name of the connection
        self._places: dict[int, RankPlace] = {}  # by the descriptor of the connection
        self._end = _End(zmq.ROUTER, address)
        self._socket = self._end.socket
        try:
            self._socket.bind(_numeric(address))
        except (zmq.ZMQError, OSError) as e:
            self._end.close()
            raise ConfigError(
                f"--dist-init-addr {address.removeprefix('tcp://')}: cannot be had on this node: "
                f"{e}; it is an address of node 0, with a port that nobody uses"
            ) from e

    def wait(self, meet: str, timeout: float, check: Callable[[], str | None]) -> None:
        """Until every rank has said hello; then tell all to meet at this address. `check` gives the
        reason when one has died. Raises ConfigError where one does not fit, EngineDeadError.
        """
        deadline = time.monotonic() + timeout
        try:
            while missing := sorted({*range(1, self._own.size)} - {*self._ranks.values()}):
                if self._socket.poll(100):
                    self._greet()
                if (reason := check()) is not None:
                    raise EngineDeadError(reason)
                if time.monotonic() > deadline:
                    raise EngineDeadError(self._missing(missing, timeout))
        except BaseException as e:
            self._tell(Welcome(refused=str(e)))
            raise
        self._tell(Welcome(meet))

    def _greet(self) -> None:
        name, *_, data = self._socket.recv_multipart(copy=False)
        try:
            hello = msgspec.msgpack.decode(data.bytes, type=Hello)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # a stranger
        if not 0 < hello.rank < self._own.size:
            return
        peer = str(data.get("Peer-Address")) if self._per_node else ""
        place = RankPlace(hello.rank, self._per_node or 1, peer)
        why = self._unfit(hello, place)
        if not why and hello.rank in self._ranks.values():
            why = f"{place} came twice: give every node a --node-rank of its own"
        self._ranks[name.bytes] = hello.rank
        self._places[self._end.met(data)] = place
        if why:
            raise ConfigError(why)

    def _unfit(self, hello: Hello, place: RankPlace) -> str:
        own = self._own
        if not hmac.compare_digest(hello.token.encode(), own.token.encode()):
            return (
                f"{place} has another secret than rank 0: give every node the same "
                "--dist-token-file"
            )
        if hello.version != own.version:
            return (
                f"{place} runs ds-runtime {hello.version}, and rank 0 {own.version}: install the "
                "same version on every node"
            )
        if hello.size != own.size:
            return f"{place} has --tp {hello.size}, and rank 0 --tp {own.size}: give every node one"
        if hello.model != own.model:
            return (
                f"{place} has another checkpoint than rank 0, by its config.json: give every node "
                "the same --model"
            )
        if hello.plan != own.plan:
            changes = self._differ(own.plan, hello.plan) or ["other notes, ranks or refusals"]
            return (
                "the ranks decided differently, so they cannot work together; give every rank the "
                "same packages, devices and flags:"
                + "".join(f"\n  {place} (there) against rank 0 (here): {x}" for x in changes)
            )
        return ""

    def _missing(self, missing: list[int], timeout: float) -> str:
        names = ", ".join(map(str, missing))
        nodes = sorted({rank // self._per_node for rank in missing}) if self._per_node else []
        on = f" on node {', '.join(map(str, nodes))}" if nodes else ""
        return f"rank {names}{on} did not start within {timeout:.0f} s (--dist-timeout)"

    def _tell(self, answer: Welcome) -> None:
        self._send(msgspec.msgpack.encode(answer))

    def _send(self, data: bytes) -> None:
        for name in self._ranks:
            self._socket.send_multipart((name, data))

    def send(self, message: msgspec.Struct) -> None:
        """Have every other rank do the same."""
        if self._ranks:
            self._send(msgspec.msgpack.encode(message))

    def watch(self, lost: Lost) -> None:
        """From now on tell when a rank of another node is gone that was not told to leave."""
        self._end.watch(lost, self._places.get)

    def close(self) -> None:
        """Tell the others to leave."""
        self._end.closing.set()
        self._send(_LEAVE)
        self._end.close()

    def part(self) -> None:
        """Let go of others that have been ended, or are refused."""
        self._end.close()


class Member:
    """Another rank's end, connected to rank 0 at `address`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._end = _End(zmq.DEALER, address)
        self._socket = self._end.socket
        self._socket.connect(address)

    def greet(self, own: Hello, timeout: float) -> str:
        """Say hello; returns where the ranks meet. Raises ConfigError with rank 0's words where
        this one does not fit, and EngineDeadError where it says nothing.
        """
        self._socket.send(msgspec.msgpack.encode(own))
        if not self._socket.poll(int(timeout * 1000)):
            where = self._address.removeprefix("tcp://")
            raise EngineDeadError(
                f"rank 0 at {where} did not answer within {timeout:.0f} s (--dist-timeout): start "
                "node 0 as well, and see that --dist-init-addr is an address of it"
            )
        answer = msgspec.msgpack.decode(self._socket.recv(), type=Welcome)
        if answer.refused:
            raise ConfigError(answer.refused)
        return answer.meet

    def watch(self, lost: Lost) -> None:
        """From now on tell when rank 0 is gone without a word, or gives no sign of life."""
        at = self._address.removeprefix("tcp://")
        where = f"rank 0 on node 0 ({at})" if self._end.far else "rank 0"
        self._end.watch(lost, lambda _: where)

    def receive(self) -> bytes:
        """What is to be done next; empty: to leave."""
        data = self._socket.recv()
        if data == _LEAVE:
            self._end.closing.set()
        return data

    def close(self) -> None:
        """Leave."""
        self._end.close()


class _End:
    """A socket that keeps everything sent to it, never blocks in sending, and is watched: that of
    rank 0 over TCP only.

    closing: the end of a connection is no news any more. far: the other end is on another node.
    """

    def __init__(self, kind: int, address: str) -> None:
        self.closing, self.far = threading.Event(), address.startswith("tcp://")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.set_hwm(0)
        if self.far and kind == zmq.ROUTER:  # strangers may reach it
            self.socket.setsockopt(zmq.RCVHWM, _FEW)
            self.socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        self._monitor: zmq.Socket[bytes] | None = None
        self._ended = set[int]()  # descriptors of connections that ended before anyone watched
        self._grace = _GRACE if self.far else _GRACE_HERE
        self._watcher: threading.Thread | None = None
        if self.far or kind == zmq.DEALER:
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, _SIGN)
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE)
            self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def met(self, data: zmq.Frame) -> int:
        """The descriptor that a message came by. One of that number may have ended before."""
        descriptor = int(data.get(zmq.SRCFD))
        if self._monitor is not None:
            while self._monitor.poll(0):
                self._ended.add(_ended(self._monitor))
        self._ended.discard(descriptor)
        return descriptor

    def watch(self, lost: Lost, who: Callable[[int], object | None]) -> None:
        """Tell of a connection that ends. who: at its other end, by its descriptor; None: nobody
        that matters."""
        if self._monitor is not None:
            args = self._monitor, lost, who
            name = "ds-runtime link"
            self._watcher = threading.Thread(target=self._watch, args=args, name=name, daemon=True)
            self._watcher.start()

    def _watch(
        self, monitor: zmq.Socket[bytes], lost: Lost, who: Callable[[int], object | None]
    ) -> None:
        while not self.closing.is_set():
            if self._ended or monitor.poll(_LOOK):
                place = who(self._ended.pop() if self._ended else _ended(monitor))
                gone = "cannot be reached any more" if self.far else "was stopped by a signal"
                if place is not None and not self.closing.wait(self._grace):
                    return lost(f"{place} has left, or {gone}")

    def close(self) -> None:
        """Send what is unsent, for a moment, and let go."""
        self.closing.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()  # a socket is no other thread's to close
        self._context.destroy(linger=200)


def _ended(monitor: zmq.Socket[bytes]) -> int:
    """The descriptor of the next connection that has ended."""
    event, _ = monitor.recv_multipart()
    return int.from_bytes(event[2:6], "little")


def _numeric(address: str) -> str:
    """The same with a host's number for its name, as binding wants it."""
    if not address.startswith("tcp://"):
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"tcp://{gethostbyname(host)}:{port}"


def secret(file: str | None) -> str:
    """A digest of what is in this file; "" without one. Raises ConfigError if it has nothing."""
    if file is None:
        return ""
    try:
        text = Path(file).read_text().strip()
    except (OSError, ValueError) as e:
        raise ConfigError(f"--dist-token-file {file}: cannot be read: {e}") from e
    if not text:
        raise ConfigError(f"--dist-token-file {file}: is empty; write a long random word to it")
    return hashlib.sha256(text.encode()).hexdigest()


def free_port(host: str) -> int:
    """A TCP port of this machine that nobody uses."""
    with create_server((host, 0)) as one:
        return int(one.getsockname()[1])
