"""Rank 0's end of the link."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from ds_runtime.common.patience import LINK_LIMITS, LinkLimits
from ds_runtime.errors import ConfigError, EngineDeadError
from ds_runtime.parallel.link.end import LinkEnd, LinkKeys, numeric
from ds_runtime.parallel.link.messages import (
    BYE,
    ENDS,
    LEAVE,
    LEFT,
    SIGN_OF_LIFE,
    Cause,
    Hello,
    Here,
    Lost,
    RankPlace,
    Told,
    Waited,
    Welcome,
    Witness,
    first_of,
)

_LOOK = 100  # milliseconds
_MANY = 1000  # messages that are read in a row
_LONGEST = 10_000  # characters of a reason

Differ = Callable[[str, str], list[str]]
"""Says how two plans differ, that of rank 0 and another's, in what ranks must have in common."""


class Leader:
    """Rank 0's end. own: its hello; differ: compares plans; per_node: ranks of a node; keys: what
    others prove to know; limits: how long it waits. Raises ConfigError where the address cannot
    be had.
    """

    def __init__(
        self,
        address: str,
        own: Hello,
        differ: Differ,
        per_node: int = 0,
        keys: LinkKeys | None = None,
        limits: LinkLimits = LINK_LIMITS,
    ) -> None:
        self._own, self._differ, self._per_node, self._limits = own, differ, per_node, limits
        self._ranks: dict[bytes, RankPlace] = {}  # by the name of the connection
        self._fit = set[int]()  # ranks that have said hello
        self._greeted = set[bytes]()  # their connections
        self._causes: list[Cause] = []
        self._told: list[bytes] = []
        self._waited = deque[tuple[int, Waited]](maxlen=_MANY)
        self._looked = 0.0
        self._strangers, self._met, self._leaving, self._off = 0, False, False, False
        self._watcher: threading.Thread | None = None
        self._end = LinkEnd(zmq.ROUTER, address, keys, limits)
        self._decoder = msgspec.msgpack.Decoder(Here | Hello | Cause | Told | Waited)
        try:
            self.address = numeric(address)
            self._end.socket.bind(self.address)
        except BaseException as e:
            self._end.close()
            if not isinstance(e, zmq.ZMQError | OSError | UnicodeError):
                raise
            raise ConfigError(
                f"--dist-init-addr {address.removeprefix('tcp://')}: cannot be had on this node: "
                f"{e}; it is an address of node 0, with a port that nobody uses"
            ) from e

    def wait(self, meet: str, timeout: float, check: Callable[[], str | None]) -> None:
        """Until every rank has said hello; then tell all to meet at this address. `check` gives the
        reason when one has died. Raises ConfigError where one does not fit, EngineDeadError.
        """
        deadline, looks = time.monotonic() + timeout, 0
        try:
            while missing := self._missing():
                looks += 1
                with self._end.lock:
                    self._read(_LOOK)
                    if self._end.far and looks % max(1, int(self._limits.sign * 1000 / _LOOK)) == 0:
                        self._give_sign()
                if self._causes:
                    raise EngineDeadError(first_of(self._causes).message)
                if (reason := check()) is not None:
                    raise EngineDeadError(reason)
                if time.monotonic() > deadline:
                    raise EngineDeadError(self._late(missing, timeout))
        except BaseException as e:
            patience = self._limits.late if isinstance(e, Exception) else 0.0
            self._refuse(str(e), self._limits.refusing if isinstance(e, ConfigError) else patience)
            raise
        with self._end.lock:
            self._met = True
            for name in self._ranks.keys() - self._greeted:  # another has that number
                place = self._ranks.pop(name)
                why = f"{place} came twice: give every node a --node-rank of its own"
                self._end.say(msgspec.msgpack.encode(Welcome(refused=why)), name)
            self._send(msgspec.msgpack.encode(Welcome(meet)))

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._own.size) if rank not in self._fit]

    def _read(self, milliseconds: int) -> bool:
        """The next that another says; whether there is one for so long. Raises ConfigError for a
        rank that does not fit.
        """
        socket = self._end.socket
        self._look_at_strangers()
        if not socket.poll(milliseconds):
            return False
        name, *_, data = socket.recv_multipart(copy=False)
        if data.bytes == LEFT:
            if self._leaving:
                self._ranks.pop(name.bytes, None)
            return True
        try:
            said = self._decoder.decode(data.bytes)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return True  # a stranger
        if isinstance(said, Cause):
            self._causes.append(self._placed(said))
        elif isinstance(said, Told):
            if name.bytes in self._ranks:
                self._told.append(said.data)
        elif isinstance(said, Waited):
            if name.bytes in self._ranks:
                self._waited.append((self._ranks[name.bytes].rank, said))
        elif 0 < said.rank < self._own.size:
            peer = str(data.get("Peer-Address")) if self._per_node else ""
            place = RankPlace(said.rank, self._per_node or 1, peer)
            if isinstance(said, Hello):
                self._greet(name.bytes, said, place)
            elif not self._met:
                self._ranks[name.bytes] = place
        return True

    def _look_at_strangers(self) -> None:
        while (event := self._end.happened(0)) is not None:
            if event.another_secret and not self._strangers:
                print(
                    "ds-runtime: a rank with another secret than rank 0 was refused: give every "
                    "node the same --dist-token-file, and start that one again",
                    file=sys.stderr,
                    flush=True,
                )
            self._strangers += event.another_secret

    def _placed(self, cause: Cause) -> Cause:
        node = cause.rank // self._per_node if self._per_node else 0
        message = cause.message[:_LONGEST] + (f" (on node {node})" if node else "")
        return Cause(cause.known, cause.rank, message)

    def _greet(self, name: bytes, hello: Hello, place: RankPlace) -> None:
        why = self._unfit(hello, place)
        if not why and hello.rank not in self._missing():
            why = f"{place} came twice: give every node a --node-rank of its own"
        if self._met:  # those that are at work go on
            self._end.say(msgspec.msgpack.encode(Welcome(refused=why)), name)
            return
        self._ranks[name] = place
        if why:
            raise ConfigError(why)
        self._fit.add(hello.rank)
        self._greeted.add(name)

    def _unfit(self, hello: Hello, place: RankPlace) -> str:
        own = self._own
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
        if hello.weights != own.weights:
            return (
                f"{place} has other weights than rank 0, under the same config.json: give every "
                "node the same files of --model and --lora"
            )
        if hello.plan != own.plan and (changes := self._differ(own.plan, hello.plan)):
            return (
                "the ranks decided differently, so they cannot work together; give every rank the "
                "same packages, devices and flags:"
                + "".join(f"\n  {place} (there) against rank 0 (here): {x}" for x in changes)
            )
        return ""

    def _late(self, missing: list[int], timeout: float) -> str:
        names = ", ".join(map(str, missing))
        nodes = sorted({rank // self._per_node for rank in missing}) if self._per_node else []
        on = f" on node {', '.join(map(str, nodes))}" if nodes else ""
        said = f"rank {names}{on} did not start within {timeout:.0f} s (--dist-timeout)"
        if self._strangers:
            said += "; ranks with another secret (--dist-token-file) were refused"
        return said

    def _refuse(self, why: str, patience: float) -> None:
        """Tell why there is no start, also those that come so many seconds later. Ranks of this
        node are told last: their end ends this process.
        """
        self._off, data = True, msgspec.msgpack.encode(Welcome(refused=why))
        told, deadline = set[bytes](), time.monotonic() + (patience if self._end.far else 0.0)
        if self._end.far and patience > self._limits.late and self._unknown():
            print(
                f"ds-runtime: not started: {why}\nds-runtime: node 0 exits in {patience:.0f} s, "
                "and tells nodes that connect until then",
                file=sys.stderr,
                flush=True,
            )
        while True:
            with self._end.lock:
                over = not self._unknown() or time.monotonic() >= deadline
                now = {n for n, p in self._ranks.items() if over or p.rank >= self._per_node}
                for name in now - told:
                    self._end.say(data, name)
                told |= now
                if over:
                    return
                try:
                    self._read(_LOOK)
                except ConfigError:
                    continue  # it is told all the same

    def _unknown(self) -> set[int]:
        """Ranks that have not been heard of."""
        known = {place.rank for place in self._ranks.values()}
        known |= {cause.rank for cause in self._causes}
        return {*range(1, self._own.size)} - known

    def _send(self, data: bytes) -> None:
        for name in self._ranks:
            self._end.say(data, name)

    def send(self, message: msgspec.Struct) -> None:
        """Have every other rank do the same."""
        if self._ranks:
            data = msgspec.msgpack.encode(message)
            with self._end.lock:
                if not self._end.closing.is_set():
                    self._send(data)

    def told(self, milliseconds: int = 0) -> list[bytes]:
        """What other ranks have answered since; waits so long for one. Raises EngineDeadError where
        one of this machine has gone, whose answer would be waited for."""
        with self._end.lock:
            if not self._told and not self._end.closing.is_set():
                self._look_for_dead()
                for _ in range(_MANY):
                    if not self._read(0 if self._told else milliseconds):
                        break
            found, self._told = self._told, []
        return found

    def waited(self) -> list[tuple[int, Waited]]:
        """What other ranks have told of their steps since, with their numbers. Never waits."""
        with self._end.lock:
            if not self._end.closing.is_set():
                for _ in range(_MANY):
                    if not self._read(0):
                        break
            found = [*self._waited]
            self._waited.clear()
        return found

    def _look_for_dead(self) -> None:
        """On one machine, where nobody else does while this process waits."""
        if self._watcher is None and time.monotonic() >= self._looked + self._limits.sign / 2:
            self._looked = time.monotonic()
            self._give_sign()
            if self._causes:
                raise EngineDeadError(first_of(self._causes).message)

    def _give_sign(self) -> None:
        """To every rank: those that cannot be reached have ended."""
        for name, place in self._ranks.items():
            if not self._end.say(SIGN_OF_LIFE, name):
                said = f"{place} has left, or cannot be reached any more"
                self._causes.append(Cause(Witness.MISSED, place.rank, said))

    def watch(self, lost: Lost) -> None:
        """From now on tell all ranks, and `lost`, when one of another node has failed, or is gone
        that was not told to leave.
        """
        if self._end.far:
            args, name = (lost,), "ds-runtime link"
            self._watcher = threading.Thread(target=self._watch, args=args, name=name, daemon=True)
            self._watcher.start()

    def _watch(self, lost: Lost) -> None:
        deadline, sign = 0.0, 0.0
        while not deadline or time.monotonic() < deadline:
            if self._end.closing.wait(_LOOK / 1000):
                return
            with self._end.lock:
                if self._end.closing.is_set():
                    return
                for _ in range(_MANY):
                    if not self._read(0):
                        break
                if time.monotonic() >= sign:
                    self._give_sign()
                    sign = time.monotonic() + self._limits.sign / 2
                if self._causes and not deadline:  # another may have failed before
                    deadline = time.monotonic() + self._limits.word
        first, own = first_of(self._causes), [c.message for c in self._causes if c.rank == 0]
        with self._end.lock:
            self._send(ENDS + first.message.encode())
        self._end.close()
        if not any(map(first.message.startswith, own)):
            lost(first.message)

    def fail(self, message: str) -> None:
        """Rank 0 has failed: tell all why the ranks end, or do not start, and `lost` if another
        failed before. On one node whoever started them tells.
        """
        if self._end.closing.is_set() or self._off:
            return
        if self._watcher is not None:
            with self._end.lock:
                self._causes.append(Cause(Witness.SAID, 0, message))
            self._watcher.join(self._limits.word + 2 * self._limits.linger)
        elif not self._met:
            self._refuse(message, self._limits.late)

    def leave(self) -> None:
        """Tell the others to leave. Until `close` those are missed that have not."""
        with self._end.lock:
            self._leaving = True
            if not self._end.closing.is_set():
                self._send(LEAVE)

    def close(self) -> None:
        """Leave; the others have been told to."""
        with self._end.lock:
            if self._end.closing.is_set():
                return  # they have been told why they end
            self._end.closing.set()
            self._send(BYE)
        self._end.close()

    def part(self) -> None:
        """Let go of others that have been ended, or are refused."""
        self._end.close()
