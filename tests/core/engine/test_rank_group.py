"""How the processes of ranks are watched: an end is seen by every thread that asks for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

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
