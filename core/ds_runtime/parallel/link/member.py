"""The end of the link of a rank other than 0."""

from __future__ import annotations

import threading
import time
from collections import deque

import msgspec
import zmq

from ds_runtime.common.patience import ENDING, LINK_LIMITS, LinkLimits
from ds_runtime.errors import ConfigError, EngineDeadError
from ds_runtime.parallel.link.end import LinkEnd, LinkKeys
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
    Told,
    Waited,
    Welcome,
    Witness,
    ask_why,
)

_LOOK = 100  # milliseconds
_TAKEN = 0.3  # seconds to read what rank 0 had still said


class Member:
    """Another rank's end, connected to rank 0 at `address`. keys: what rank 0 proves to know.
    limits: how long it waits.
    """

    def __init__(
        self, address: str, keys: LinkKeys | None = None, limits: LinkLimits = LINK_LIMITS
    ) -> None:
        self._address, self._keys, self._limits = address, keys, limits
        self._end = LinkEnd(zmq.DEALER, address, keys, limits)
        self._end.socket.connect(address)
        self._at = address.removeprefix("tcp://")
        self._met = False
        self._kept = deque[bytes]()  # what the watching thread has read
        self._why = ""
        self._watcher: threading.Thread | None = None

    @property
    def _where(self) -> str:
        return f"rank 0 on node 0 ({self._at})" if self._end.far else "rank 0"

    def _gone(self) -> str:
        """Why rank 0 is gone, if whoever started it tells; or that it is."""
        if self._end.far and (why := ask_why(self._address, self._keys, self._limits)):
            return why
        how = "cannot be reached any more" if self._end.far else "was stopped by a signal"
        return f"{self._where} has left, or {how}"

    def arrive(self, rank: int) -> None:
        """Say that this rank is there, before it has decided anything."""
        self._end.say(msgspec.msgpack.encode(Here(rank)))

    def greet(self, own: Hello, timeout: float) -> str:
        """Say hello; returns where the ranks meet. Raises ConfigError with rank 0's words where
        this one does not fit, or rank 0 has another secret, and EngineDeadError where it says
        nothing, or is gone.
        """
        try:
            return self._greet(own, timeout)
        except (ConfigError, EngineDeadError) as e:
            self._why = str(e)  # rank 0 knows, or cannot be told
            raise

    def _greet(self, own: Hello, timeout: float) -> str:
        now, ended = time.monotonic(), False
        deadline, refused = now + timeout, 0.0
        if not self._end.say(msgspec.msgpack.encode(own)):
            refused = now
        while True:
            now = time.monotonic()
            while (event := self._end.happened(0)) is not None:
                refused = (refused or now) if event.refused else 0.0 if event.met else refused
                ended = ended or (event.ended and not refused)
            if self._end.socket.poll(_LOOK):
                data = self._end.socket.recv()
                if data == SIGN_OF_LIFE:
                    continue
                answer = msgspec.msgpack.decode(data, type=Welcome)
                if answer.refused:
                    raise ConfigError(answer.refused)
                self._met = True
                return answer.meet
            if ended:
                raise EngineDeadError(self._gone())
            if refused and now - refused > self._limits.refused:
                raise ConfigError(
                    f"rank 0 at {self._at} has another secret, or something else listens there: "
                    "give every node the same --dist-token-file and --dist-init-addr"
                )
            if now > deadline:
                raise EngineDeadError(
                    f"rank 0 at {self._at} did not answer within {timeout:.0f} s (--dist-timeout): "
                    "start node 0 as well, and see that --dist-init-addr is an address of it"
                )

    def watch(self, lost: Lost) -> None:
        """From now on tell when rank 0 is gone without a word, gives no sign of life, or has told
        why all ranks end.
        """
        args, name = (lost,), "ds-runtime link"
        self._watcher = threading.Thread(target=self._watch, args=args, name=name, daemon=True)
        self._watcher.start()

    def _watch(self, lost: Lost) -> None:
        while not self._end.closing.is_set():
            if (event := self._end.happened(_LOOK)) is not None and event.ended:
                break
        deadline = time.monotonic() + (_TAKEN if self._end.far else ENDING)
        while not self._end.closing.wait(_LOOK / 1000):
            if self._end.lock.acquire(blocking=False):  # else who waits for a step hears the word
                try:
                    self._keep()
                finally:
                    self._end.lock.release()
            if self._why or time.monotonic() > deadline:
                why = self._why or self._gone()
                if not self._end.closing.is_set():  # it may have said meanwhile that it leaves
                    lost(self._why or why)
                return

    def _keep(self) -> None:
        """Read what is there, and hear what is last in it."""
        while self._end.socket.poll(0):
            self._kept.append(self._hear(self._end.socket.recv()))

    def _hear(self, data: bytes) -> bytes:
        if data[:1] == ENDS:
            self._why = data[1:].decode()
        elif not self._met and data != SIGN_OF_LIFE:
            self._why = msgspec.msgpack.decode(data, type=Welcome).refused
        elif data == BYE or (data == LEAVE and not self._end.far):
            self._end.closing.set()
        return data

    def receive(self, milliseconds: int | None = None) -> bytes | None:
        """What is to be done next; empty: to leave; None: nothing for so long. Raises
        EngineDeadError with why ranks end."""
        data = SIGN_OF_LIFE
        while data == SIGN_OF_LIFE:
            with self._end.lock:
                if self._kept:
                    data = self._kept.popleft()
                elif milliseconds is None or self._end.socket.poll(milliseconds):
                    data = self._hear(self._end.socket.recv())
                else:
                    return None
        if data[:1] == ENDS:
            raise EngineDeadError(self._why)
        return data

    def tell(self, data: bytes) -> None:
        """Answer rank 0."""
        self._say(Told(data))

    def waited(self, told: Waited) -> None:
        """Tell rank 0 of a step."""
        self._say(told)

    def _say(self, message: Told | Waited) -> None:
        with self._end.lock:
            if not self._end.closing.is_set():
                self._end.say(msgspec.msgpack.encode(message))

    def fail(self, rank: int, message: str) -> str:
        """This rank has failed: returns why the ranks end, as rank 0 says, or this. On one node
        whoever started them tells.
        """
        if not self._end.far or self._why or self._end.closing.is_set():
            return self._why or message
        deadline = time.monotonic() + 2 * self._limits.word
        with self._end.lock:
            heard = self._end.say(msgspec.msgpack.encode(Cause(Witness.SAID, rank, message)))
            while heard and not self._why and (left := deadline - time.monotonic()) > 0:
                if self._end.socket.poll(int(left * 1000)):
                    self._hear(self._end.socket.recv())
        return self._why or message

    def close(self) -> None:
        """Leave. May be called twice."""
        self._end.closing.set()
        if self._end.far and not self._end.socket.closed:
            with self._end.lock:
                self._end.say(LEFT)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        self._end.close()
