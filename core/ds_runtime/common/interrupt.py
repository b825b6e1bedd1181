"""Signals: Ctrl-C at a moment of our choosing, where it would leave something half done, the end of
children, what they may take of time and memory, and names."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def ignored(*others: signal.Signals) -> Iterator[None]:
    """Ctrl-C does nothing here, and no signal of `others`. Children started in here never see
    them, not even while Python starts in them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, *others)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; a second one does not."""
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield
        return
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def keep_exit_codes() -> None:
    """Have the system keep the exit codes of this process's children. It does not where whoever
    started this process had it ignore their end."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """The process ends where the block takes more processor time: SIGPROF ends it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def bound_memory(more: int) -> None:
    """This process may take `more` bytes of address space beyond what it has, and writes no core
    file. A lower hard limit stays. Nothing is bounded where the system has no /proc, or a sandbox
    allows no limits.
    """
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ImportError):
        return
    limit, (_, hard) = pages * resource.getpagesize() + more, resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def signal_name(number: int) -> str:
    """As `kill -l` says it, or its number: Python names not all that a system has."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")
