"""Rules are first compiled in a process of their own, which may run out of time, memory or stack.

    python -m ds_runtime.grammar.check FOLDER VOCAB_SIZE EOS…

The child reads rules from standard input, one message each, and answers with a fault or none. It
ends with its standard input.
"""

from __future__ import annotations

import contextlib
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from ds_runtime.common.interrupt import bound_memory, bounded
from ds_runtime.errors import FieldPath, RequestError
from ds_runtime.output_rules import OutputRules

SECONDS = 2.0  # of processor time for one rule
MEMORY = 1 << 30  # bytes beyond what the process has once the vocabulary is loaded
_STACK = 1 << 26  # bytes; of the thread that compiles for good as well
_HEADER = struct.Struct("<I")


class _Verdict(msgspec.Struct):
    """What is wrong, and with which field; nothing said: nothing."""

    said: tuple[str | FieldPath, ...] = ()
    param: str = ""


class Checker:
    """The child's owner; starts it when it is first needed, and again after it fell."""

    def __init__(self, folder: Path, vocab_size: int, eos: Sequence[int]) -> None:
        self._args = [str(folder), str(vocab_size), *map(str, eos)]
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, rules: OutputRules) -> None:
        """Raises RequestError for rules that cannot be compiled, or not within bounds."""
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        try:
            _write(child.stdin, msgspec.msgpack.encode(rules))
            answer = _read(child.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise _fell(rules, self._end())
        verdict = msgspec.msgpack.decode(answer, type=_Verdict)
        if verdict.said:
            raise RequestError(verdict.said, verdict.param or rules.param)

    def close(self) -> None:
        """End the child. May be called twice."""
        child = self._child
        if child is not None:
            with contextlib.suppress(OSError):
                child.kill()
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "ds_runtime.grammar.check", *self._args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for its owner, which then ends it
            )
        return self._child

    def _end(self) -> int:
        child, self._child = self._child, None
        if child is None:
            return 0
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return child.wait()


def _fell(rules: OutputRules, code: int) -> RequestError:
    why = f"it takes more than {MEMORY >> 30} GiB of memory or is nested too deeply"
    if code == -signal.SIGPROF:
        why = f"it takes more than {SECONDS:g} s"
    beside = rules.tool_calls is not None and rules.kind != "tool_calls"
    other = (" or ", FieldPath.of(rules.tools_param)) if beside else ()
    return RequestError.of(rules.param, *other, f" cannot be compiled: {why}; simplify it")


def start_deep(target: threading.Thread) -> None:
    """Start a thread with the stack that the child compiles on."""
    before = threading.stack_size(_STACK)
    try:
        target.start()
    finally:
        threading.stack_size(before)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_HEADER.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """The next message; None at the end."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    data = pipe.read(*_HEADER.unpack(header))
    return data if len(data) == _HEADER.unpack(header)[0] else None


def _serve(folder: str, vocab_size: str, eos: Sequence[str]) -> None:
    from ds_runtime.grammar.compile import Compiler

    compiler = Compiler(Path(folder), int(vocab_size), [int(e) for e in eos])
    bound_memory(MEMORY)
    while (data := _read(sys.stdin.buffer)) is not None:
        verdict = _Verdict()
        with bounded(SECONDS):
            try:
                compiler.compile(msgspec.msgpack.decode(data, type=OutputRules))
            except RequestError as e:
                verdict = _Verdict(e.said, e.param or "")
            except (RecursionError, MemoryError) as e:
                verdict = _Verdict((f"a rule for the output is too deep or too large: {e}",))
        _write(sys.stdout.buffer, msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    worker = threading.Thread(target=_serve, args=(sys.argv[1], sys.argv[2], sys.argv[3:]))
    start_deep(worker)
    worker.join()
