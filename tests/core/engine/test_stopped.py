"""A process that is stopped by a signal is ended, unless it is soon continued."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from ds_runtime.config import EngineConfig
from ds_runtime.engine.process import stopped
from ds_runtime.engine.process.failure import reasons
from ds_runtime.engine.process.rankspec import RankSpec


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Two processes, watched twenty times a second."""
    monkeypatch.setattr(stopped, "_LOOK", 0.05)
    monkeypatch.setattr(stopped, "PATIENCE", 0.5)
    context, over = multiprocessing.get_context("fork"), threading.Event()
    processes = [context.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    specs = [RankSpec(EngineConfig(tp=2), (), (), tmp_path, rank) for rank in range(2)]
    stopped.end_stopped(zip(specs, processes, strict=True), over)
    yield processes
    over.set()
    for process in processes:
        process.kill()
        process.join()


def test_who_stays_stopped_is_ended_with_a_reason(ranks, tmp_path):
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[1].join(20)
    assert ranks[1].exitcode == -signal.SIGKILL and ranks[0].is_alive()
    (said,) = reasons(tmp_path, range(2))
    assert said.rank == 1
    assert said.message == "engine rank 1 was stopped by a signal and not continued for 0 s"


def test_who_is_continued_is_let_be(ranks, tmp_path):
    for _ in range(4):
        os.kill(ranks[0].pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(ranks[0].pid, signal.SIGCONT)
        time.sleep(0.15)
    assert ranks[0].is_alive() and not reasons(tmp_path, range(2))
