"""Tokenizer and template of a checkpoint, with what its files can make last for ever kept apart.

Loading, rendering and encoding run in a process of their own (`worker.py`), in as many copies as
requests ask at once, each within bounds. This process decodes, which takes time that grows with the
text and nothing else.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from ds_runtime import errors
from ds_runtime.common.readable import readable
from ds_runtime.errors import CheckpointError, QueueFullError, RequestError
from ds_runtime.text.formats.template import Message, Template
from ds_runtime.text.tokenizer import Tokenizer
from ds_runtime.text.worker import (
    LOAD_MEMORY,
    LOAD_SECONDS,
    MEMORY,
    SECONDS,
    Loaded,
    LoadRequest,
    Reply,
    receive,
    seconds_for,
    send,
)

WORKERS = 16  # copies at once: one less may take long, and nobody notices
_EAGER = 0.1  # of the time that work may take, it takes as eagerly as any; then it gives way
_PATIENCE = 4.0  # times as long by the clock, for machines that are busy
_KEPT = 4  # copies that wait for work
_NICE = 10


class Text:
    """The tokenizer and the template of a checkpoint. `ended`: pieces of work that were stopped.
    `aside` is around each wait for the other process.

    text: the folder of their files. folder: the model's, from which its family follows. model: its
    name. chat_template: a file in place of the checkpoint's template. seconds: of processor time
    for a short request. Raises CheckpointError for files that cannot be loaded within bounds.
    """

    def __init__(
        self,
        text: Path,
        folder: Path,
        model: str = "",
        chat_template: str | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self.ended = 0
        self.aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._asked = LoadRequest(str(text), str(folder), model, chat_template, seconds)
        self._copies = _Copies(self._asked)
        weakref.finalize(self, self._copies.close)
        try:
            loaded = self._copies.load()
            _raise(loaded.error)
            self._copies.prepare()
            self.tokenizer = Tokenizer.load(text, self._encode)  # which the other could
        except BaseException:
            self.close()
            raise
        self._error, about = loaded.template_error, loaded.template
        self._template = None if about is None else _Apart(self, *about)

    @property
    def template(self) -> Template | None:
        """The template, if there is one. Raises what loading it did."""
        _raise(self._error)
        return self._template

    def close(self) -> None:
        """End the process, whatever it does. May be called twice. Asking restarts it."""
        self._copies.close()

    def _encode(self, text: str, add_special: bool, mark: str) -> list[int]:
        data = self._ask("encode", (text, add_special, mark), "tokenizer", None)
        return array.array("I", data).tolist()

    def render(self, *given: Any) -> str:
        """`Template.render`, within bounds. RequestError where these are not enough;
        QueueFullError where too many ask at once."""
        return self._ask("render", given, "chat template", "messages").decode()

    def _ask(self, what: str, given: tuple[Any, ...], tool: str, param: str | None) -> bytes:
        try:
            data = pickle.dumps((what, given), pickle.HIGHEST_PROTOCOL)
        except RecursionError as e:
            raise RequestError("the messages are nested too deeply", param) from e
        seconds, begin = seconds_for(self._asked, len(data)), time.monotonic()
        with self.aside(), self._copies.one(_PATIENCE * seconds) as copy:
            answer = copy.ask(data, seconds)
        if answer is None:
            self.ended += 1
            late = time.monotonic() - begin >= seconds
            took = f"{seconds:.3g} s" if late else f"{MEMORY >> 30} GiB of memory"
            raise RequestError(
                f"the checkpoint's {tool} takes more than {took} for this text, and was ended: "
                "send less or other text, or serve another checkpoint",
                param,
            )
        if answer.said:
            raise RequestError(answer.said, answer.param)
        return answer.data


@dataclass
class _Apart:
    """A `Template` that renders elsewhere."""

    text: Text
    knows_developer: bool
    takes_response_format: bool
    tool_calls: str | None
    source: str | None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        return self.text.render(messages, tools, add_generation_prompt, kwargs)


def _raise(error: tuple[str, str] | None) -> None:
    if error is not None:
        raise getattr(errors, error[0])(error[1])


class _Copy:
    """One copy of the text process. It works on one thing at a time."""

    def __init__(self, here: socket.socket, leash: IO[bytes]) -> None:
        self._here, self._leash = here, leash
        said = receive(here)
        if said is None:
            raise EOFError
        self._number = int.from_bytes(said, "little")
        self.fresh = True  # to be asked again

    @property
    def alive(self) -> bool:
        """Whether it waits for work: one that ended has closed its side."""
        return not readable([self._here.fileno()], 0)

    def ask(self, data: bytes, seconds: float) -> Reply | None:
        """Its answer; None where it was ended."""
        self.fresh = False
        try:
            send(self._here, data)
            if readable([self._here.fileno()], _EAGER * seconds):
                self.fresh = True
            else:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, self._number, _NICE)
            self._here.settimeout(_PATIENCE * seconds)
            found = receive(self._here)
            self._here.settimeout(None)
        except OSError:  # a timeout is one, too
            found = None
        self.fresh &= found is not None
        return None if found is None else msgspec.msgpack.decode(found, type=Reply)

    def stop(self) -> None:
        """End it, whatever it does: whoever waits for its answer gets none."""
        self._leash.close()

    def close(self) -> None:
        """End it and forget it. Nobody may wait for it."""
        self._leash.close()
        self._here.close()


class _Copies:
    """The text process and its copies. Both come anew where somebody else ended them."""

    def __init__(self, asked: LoadRequest) -> None:
        self._asked = asked
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: socket.socket | None = None
        self._leash: IO[bytes] | None = None
        self._idle: list[_Copy] = []
        self._busy: set[_Copy] = set()
        self._lock = threading.Lock()
        self._room = threading.Semaphore(WORKERS)

    def load(self) -> Loaded:
        """Start the process; what it says once the files are loaded."""
        self.close()
        self._owner, there = socket.socketpair()
        end, self._leash = _pipe()
        with there, end:
            numbers = there.fileno(), end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ds_runtime.text.worker", *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for its owner
            )
        begin = time.monotonic()
        send(self._owner, msgspec.msgpack.encode(self._asked))
        self._owner.settimeout(_PATIENCE * LOAD_SECONDS)
        try:
            said = receive(self._owner)
        except OSError:
            said = None
        if said is None:
            late = time.monotonic() - begin >= LOAD_SECONDS
            took = f"{LOAD_SECONDS:g} s" if late else f"{LOAD_MEMORY >> 30} GiB of memory"
            raise CheckpointError(
                f"{self._asked.text}: tokenizer and chat template take more than {took} to load: "
                "download tokenizer.json again, or pass another template with --chat-template FILE"
            )
        self._owner.settimeout(None)
        return msgspec.msgpack.decode(said, type=Loaded)

    def prepare(self) -> None:
        """Have all copies that are kept wait for the first requests."""
        self._idle += [self._new() for _ in range(_KEPT)]

    @contextlib.contextmanager
    def one(self, seconds: float) -> Iterator[_Copy]:
        """A copy for this block. QueueFullError where none is free for so long."""
        if not self._room.acquire(timeout=seconds):
            raise QueueFullError(f"the text of {WORKERS} other requests is being worked on")
        try:
            copy = self._waiting() or self._new()
            self._busy.add(copy)
            try:
                yield copy
            finally:
                self._busy.discard(copy)
                if copy.fresh and len(self._idle) < _KEPT:
                    self._idle.append(copy)
                else:
                    copy.close()
        finally:
            self._room.release()

    def _waiting(self) -> _Copy | None:
        while True:
            try:
                copy = self._idle.pop()
            except IndexError:
                return None
            if copy.alive:
                return copy
            copy.close()

    def _new(self) -> _Copy:
        (here, there), (end, leash) = socket.socketpair(), _pipe()
        with there, end, self._lock:
            given = [there.fileno(), end.fileno()]
            try:
                self._hand_over(given)
            except OSError:  # the process has ended
                _raise(self.load().error)
                self._hand_over(given)
        try:
            return _Copy(here, leash)
        except (OSError, EOFError) as e:
            here.close()
            leash.close()
            raise QueueFullError("no process can be started for this text", 5) from e

    def _hand_over(self, given: list[int]) -> None:
        assert self._owner is not None
        socket.send_fds(self._owner, [b"+"], given)

    def close(self) -> None:
        """End all of them. May be called twice."""
        for copy in [*self._busy]:
            copy.stop()
        while self._idle:
            self._idle.pop().close()
        if self._process is not None and self._owner is not None and self._leash is not None:
            self._leash.close()
            self._owner.close()
            self._process.wait()


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return open(reading, "rb", 0), open(writing, "wb", 0)
