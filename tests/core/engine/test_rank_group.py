"""How the processes of ranks are watched: an end is seen by every thread that asks for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from ds_runtime.engine.process.launch import RankGroup


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_thread_is_told_the_exit_code(monkeypatch, threads):
    """A watcher reaps a rank while another thread closes: only one is told by the system."""
    reap = os.waitpid

    def slow(*args):
        found = reap(*args)
        time.sleep(0.2)  # between the kernel's answer and the process object's note of it
        return found

    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    monkeypatch.setattr(os, "waitpid", slow)
    group = RankGroup([])
    with ThreadPoolExecutor(threads) as pool:
        waiting = [pool.submit(group._code, process, 30.0) for _ in range(threads)]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert [one.result() for one in waiting] == [-signal.SIGKILL] * threads


def test_a_process_that_lives_has_no_exit_code():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        assert RankGroup([])._code(process) is None
    finally:
        process.kill()
        process.join()


def reaps(*_):
    """As a library does that waits for every child there is."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


LATER = signal.SIGRTMIN + 6  # which Python has no name for
ENDS = [
    (signal.SIG_DFL, signal.SIGKILL, "was ended by SIGKILL (out of memory?)"),
    (signal.SIG_DFL, LATER, f"was ended by signal {LATER:d}"),
    (signal.SIG_IGN, signal.SIGKILL, "has ended, and something else took its exit code"),
    (reaps, signal.SIGKILL, "engine rank 0 "),  # whoever is first
]


@pytest.mark.parametrize(
    ("handler", "number", "said"), ENDS, ids=["named", "unnamed", "ignored", "reaped"]
)
def test_every_end_of_a_rank_is_a_failure(tmp_path, handler, number, said):
    """Also one whose exit code nobody here is told."""
    before = signal.signal(signal.SIGCHLD, handler)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        group = RankGroup([])
        spec = SimpleNamespace(rank=0, size=1, folder=tmp_path, nodes=(), address="", keys=None)
        group._specs, group._processes = [spec], [process]
        watcher = threading.Thread(target=group._watch, daemon=True)
        watcher.start()
        time.sleep(0.2)
        assert process.pid is not None
        os.kill(process.pid, number)
        until = time.monotonic() + 20
        while not group.over.is_set() and time.monotonic() < until:
            time.sleep(0.02)  # here handlers of signals run
        assert group.over.is_set() and said in str(group.failure)
    finally:
        process.kill()
        signal.signal(signal.SIGCHLD, before)
