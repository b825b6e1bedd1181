"""A child that is stopped by a signal is told of, unless it is soon continued."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from ds_runtime.common import stopped


@pytest.fixture
def children(monkeypatch):
    """Two processes, watched twenty times a second; who is told of is killed."""
    monkeypatch.setattr(stopped, "_LOOK", 0.05)
    monkeypatch.setattr(stopped, "STOPPED", 0.5)
    context, over = multiprocessing.get_context("fork"), threading.Event()
    processes = [context.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    pids = [process.pid for process in processes]
    stopped.tell_stopped(pids, over, lambda pid: os.kill(pid, signal.SIGKILL))
    yield processes
    over.set()
    for process in processes:
        process.kill()
        process.join()


def test_who_stays_stopped_is_told_of(children):
    os.kill(children[1].pid, signal.SIGSTOP)
    children[1].join(20)
    assert children[1].exitcode == -signal.SIGKILL and children[0].is_alive()


def test_who_is_continued_is_let_be(children):
    for _ in range(4):
        os.kill(children[0].pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(children[0].pid, signal.SIGCONT)
        time.sleep(0.15)
    assert children[0].is_alive()
