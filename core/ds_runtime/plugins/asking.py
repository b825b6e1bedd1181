"""While a plugin is asked: who it is, how long it takes, and that it starts no runtime meanwhile.

Most hooks are pure: the same question gets the same answer, so it is asked once per process.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ds_runtime.errors import PluginError
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.hookspecs import OFFER_HOOKS

SLOW = 1.0  # seconds of one question, from which a line says whose they were
LISTS = (*OFFER_HOOKS, "ds_defaults")  # hooks that return sequences
PURE = ("ds_platform", *LISTS)
_log = logging.getLogger(__name__)


class Misuse(PluginError):
    """What a plugin did when it was asked, in a sentence of its own."""


@dataclass(frozen=True, eq=False, slots=True)
class _Question:
    """plugin is being asked for `what` by `thread`; the threads `others` were there before."""

    plugin: str
    what: str
    thread: int
    others: frozenset[int]


_open: list[_Question] = []


@contextlib.contextmanager
def asking(plugin: str, what: str) -> Iterator[None]:
    """Around every call of a plugin's own code before it serves: a hook, its import, its probes."""
    if os.environ.get("DS_TRACE_PLUGINS"):
        print(f"plugin call: {plugin}.{what}", file=sys.stderr)
    others = frozenset(sys._current_frames())
    question = _Question(plugin, what, threading.get_ident(), others)
    _open.append(question)
    began, had_torch = time.perf_counter(), "torch" in sys.modules
    try:
        yield
    finally:
        _open.remove(question)
        if (took := time.perf_counter() - began) > SLOW:
            _log.warning("plugin %s: its %s took %.1f s%s", plugin, what, took, _why(had_torch))


def _why(had_torch: bool) -> str:
    """What a slow question did that it need not."""
    if had_torch or "torch" not in sys.modules:
        return ""
    return ", in which it imported torch: import that only in the modules that lazy texts name"


def check_outside() -> None:
    """Where a runtime starts: PluginError within a question, which would be asked for ever.

    A thread that came up during a question waits until it is over: if whoever asks waits for the
    thread, that would be for ever as well.
    """
    me = threading.get_ident()
    while within := [q for q in _open if me == q.thread or me not in q.others]:
        for question in within:
            if me == question.thread or _waits(question.thread):
                raise Misuse(
                    f"{question.what} of plugin {question.plugin} starts a runtime (LLM, assemble "
                    "or load_plugins) while it is asked: return what the plugin brings. Start a "
                    "runtime in a command of its own (ds_cli adds one) or in a script"
                )
        time.sleep(0.01)


def _waits(thread: int) -> bool:
    """Whether a thread waits for others: joins one, or waits for a condition (futures, events)."""
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename != threading.__file__:
        return False
    return frame.f_code.co_name in ("join", "_wait_for_tstate_lock", "wait")


class Implementation(Protocol):
    """A plugin's function for a hook, called by position."""

    def __call__(self, *arguments: Any) -> Any: ...


_Answer = Callable[[], Any]  # gives what was returned, or raises what was raised
_answers: WeakKeyDictionary[Implementation, tuple[Sequence[Any], _Answer]] = WeakKeyDictionary()


def ask(plugin: str, hook: str, function: Implementation, arguments: Sequence[Any]) -> Any:
    """The answer of a plugin's hook, which is called once per process if it is pure.

    Sequences are tuples, read while the plugin is asked. Raises what the hook raises.
    """
    if hook not in PURE:
        with asking(plugin, hook):
            return function(*arguments)
    known = _answers.get(function)
    if known is None or known[0] != arguments:
        known = _answers[function] = (arguments, _answer(plugin, hook, function, arguments))
    return known[1]()


def _answer(plugin: str, hook: str, function: Implementation, arguments: Sequence[Any]) -> _Answer:
    try:
        with asking(plugin, hook):
            answer = function(*arguments)
            if hook in LISTS:
                answer = _tuple(hook, answer)
    except KeyboardInterrupt:  # the user's; a plugin that leaves is broken
        raise
    except BaseException as e:
        failure, stack = e, e.__traceback__

        def fail() -> Any:
            raise failure.with_traceback(stack)

        return fail
    # Each runtime settles its own platform (`configure`, `local_rank`): nobody has the first one.
    return (lambda: copy.copy(answer)) if isinstance(answer, Platform) else (lambda: answer)


def _tuple(hook: str, answer: Any) -> tuple[Any, ...]:
    try:
        return tuple(answer or ())
    except (Misuse, KeyboardInterrupt):
        raise
    except BaseException as e:
        raise Misuse(f"{hook} returned no sequence: {type(e).__name__}: {e}") from e
