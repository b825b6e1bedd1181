"""The text process: a checkpoint's tokenizer and template, where both can be ended at any moment.

    python -P -m ds_runtime.text.worker SOCKET LEASH

What to load comes first; then each byte brings another socket with its leash, and a copy of this
process serves that one. A template may loop and a pattern backtrack for ever, neither of which
Python can interrupt. So the kernel ends them, by processor time, by memory, and when the other side
lets go of the leash: the reading end of a pipe.
"""

from __future__ import annotations

import array
import fcntl
import gc
import os
import pickle
import signal
import socket
import struct
import sys
from typing import Any

import msgspec

from ds_runtime.common.interrupt import bound_memory, bounded
from ds_runtime.common.readable import readable
from ds_runtime.errors import DsRuntimeError, FieldPath, RequestError, named
from ds_runtime.text.formats.families import find_family
from ds_runtime.text.formats.template import Template, load_template
from ds_runtime.text.tokenizer import Tokenizer

LOAD_SECONDS = 20.0  # of processor time for the files; published ones take a second
LOAD_MEMORY = 2 << 30  # bytes beyond what Python takes
SECONDS, SECONDS_PER_MB = 2.0, 4.0  # likewise for one request, and for every million bytes of it
MEMORY = 1 << 30  # bytes for one request beyond what has been loaded
LONGEST = 64 << 20  # bytes of rendered text
_HEADER = struct.Struct("<I")


class LoadRequest(msgspec.Struct):
    """What to load: tokenizer and template lie in `text`, what the model is in `folder`.

    seconds: of processor time that a short request may take.
    """

    text: str
    folder: str
    model: str
    chat_template: str | None
    seconds: float


class Loaded(msgspec.Struct):
    """What was loaded. error: the class and message of what went wrong, of the tokenizer or of the
    template alone. A template is None where there is none."""

    error: tuple[str, str] | None = None
    template: tuple[bool, bool, str | None, str | None] | None = None
    template_error: tuple[str, str] | None = None


class Reply(msgspec.Struct):
    """Text in UTF-8, or ids as machine words of 32 bits; else what is wrong, with which field."""

    data: bytes = b""
    said: str | tuple[str | FieldPath, ...] = ""
    param: str | None = None


def seconds_for(asked: LoadRequest, size: int) -> float:
    """Seconds of processor time that a request of this many bytes may take."""
    return asked.seconds + SECONDS_PER_MB * size / 1e6


def send(to: socket.socket, data: bytes) -> None:
    """One message."""
    to.sendall(_HEADER.pack(len(data)))
    to.sendall(data)


def receive(of: socket.socket) -> bytes | None:
    """The next message; None at the end."""
    header = _exactly(of, _HEADER.size)
    return None if header is None else _exactly(of, *_HEADER.unpack(header))


def _exactly(of: socket.socket, size: int) -> bytes | None:
    room = bytearray(size)
    view = memoryview(room)
    while view:
        count = of.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return bytes(room)


def hold(leash: int) -> None:
    """From now on this process ends when the other side lets go."""
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETFL, os.O_ASYNC)  # SIGIO, which ends the process
    if readable([leash], 0):  # it did so before
        os._exit(0)


def _load(asked: LoadRequest) -> tuple[Loaded, Tokenizer | None, Template | None]:
    try:
        tokenizer = Tokenizer.load(asked.text)
    except BaseException as e:  # Rust's panics are no Exception
        return Loaded(error=_error(asked, "tokenizer.json", e)), None, None
    try:
        family = find_family(asked.folder, asked.model)
        template = load_template(asked.text, tokenizer, asked.chat_template, family)
    except BaseException as e:
        return Loaded(template_error=_error(asked, "the chat template", e)), tokenizer, None
    if template is None:
        return Loaded(), tokenizer, None
    about = (
        template.knows_developer,
        template.takes_response_format,
        template.tool_calls,
        template.source,
    )
    return Loaded(template=about), tokenizer, template


def _error(asked: LoadRequest, what: str, error: BaseException) -> tuple[str, str]:
    if isinstance(error, DsRuntimeError):
        return type(error).__name__, str(error)
    return "CheckpointError", f"{asked.text}: {what} cannot be read: {named(error):.300}"


def _answer(
    tokenizer: Tokenizer, template: Template | None, what: str, given: tuple[Any, ...]
) -> Reply:
    try:
        if what == "encode":
            return Reply(array.array("I", tokenizer.split(*given)).tobytes())
        assert template is not None
        text = template.render(*given).encode()
        if len(text) > LONGEST:
            raise RequestError(
                f"the chat template makes {len(text)} bytes of these messages, and at most "
                f"{LONGEST} are taken: shorten them",
                "messages",
            )
        return Reply(text)
    except RequestError as e:
        return Reply(said=e.said, param=e.param)
    except UnicodeEncodeError as e:
        said = f"the chat template writes an unpaired surrogate at character {e.start}"
        return Reply(said=f"{said}: send valid Unicode", param="messages")
    except BaseException as e:
        tool = "tokenizer" if what == "encode" else "chat template"
        return Reply(said=f"the checkpoint's {tool} fails on this text: {named(e):.300}")


def _serve(
    client: socket.socket, asked: LoadRequest, tokenizer: Tokenizer, template: Template | None
) -> None:
    bound_memory(MEMORY)
    send(client, _HEADER.pack(os.getpid()))
    while (data := receive(client)) is not None:
        with bounded(seconds_for(asked, len(data))):
            what, given = pickle.loads(data)
            answer = _answer(tokenizer, template, what, given)
        send(client, msgspec.msgpack.encode(answer))


def main(owner: socket.socket, leash: int) -> None:
    """Serve until the owner closes its side."""
    hold(leash)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies
    data = receive(owner)
    if data is None:
        return
    asked = msgspec.msgpack.decode(data, type=LoadRequest)
    with bounded(LOAD_SECONDS):
        bound_memory(LOAD_MEMORY)
        loaded, tokenizer, template = _load(asked)
    send(owner, msgspec.msgpack.encode(loaded))
    gc.freeze()  # so that copies share the pages
    while tokenizer is not None:
        byte, given, *_ = socket.recv_fds(owner, 1, 2)
        if not byte:
            return
        with socket.socket(fileno=given[0]) as client:
            if _copied():
                try:
                    owner.close()
                    hold(given[1])
                    os.close(leash)
                    _serve(client, asked, tokenizer, template)
                finally:
                    os._exit(0)
            os.close(given[1])


def _copied() -> bool:
    """Whether this is the copy; False as well where none can be made."""
    try:
        return os.fork() == 0
    except OSError:
        return False


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
