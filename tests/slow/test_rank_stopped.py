"""A rank that is killed, stopped or raises while others wait for it, or for nothing: in start-up,
in idle and in a step. Everybody reads why, and no process is left after 10 s.
"""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from test_rank_death import (
    LIMIT,
    Front,
    Offline,
    check_all,
    check_end,
    check_told,
    environment,
    family,
    plugin,
)

from ds_runtime.engine.messages import Ready, Tokens
from ds_runtime.engine.process.transport import private_folder

__all__ = ["plugin"]
pytestmark = pytest.mark.slow
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@pytest.mark.parametrize(
    ("phase", "rank", "how"),
    [
        ("start", 1, "stop gloo"),
        ("load", 0, "stop gloo"),
        ("load", 1, "stop holding"),  # the other one holds Python's lock while it waits
        ("prefill", 0, "stop deaf"),
        ("decode", 1, "stop gloo"),
        ("decode", 0, "stop spinning"),
        ("decode", 0, "kill spinning"),
        ("decode", 1, "raise spinning"),
        ("capture", 1, "kill spinning"),
    ],
)
def test_others_may_wait_or_spin_in_a_collective(tmp_path, monkeypatch, phase, rank, how):
    env, at = environment(tmp_path, rank, phase, how)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with private_folder() as folder:
        front = Front(folder, phase)
        try:
            serves = front.until(Ready)
            assert serves is (phase in ("prefill", "decode")), front.engine.poll()
            if serves:
                front.ask()
                assert front.until(Tokens) is (phase != "prefill")
                assert not front.until(())
            check_told(front.engine.poll(), rank, phase, how.split()[0])
            check_end(at, front.family)
        finally:
            front.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_in_idle(tmp_path, monkeypatch, rank, how):
    env, at = environment(tmp_path, rank, "never", "kill gloo")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with private_folder() as folder:
        front = Front(folder, "idle")
        try:
            assert front.until(Ready), front.engine.poll()
            at.write_text(str(time.time()))
            os.kill(front.engine.pids[rank], SIGNALS[how])
            assert not front.until(())
            check_told(front.engine.poll(), rank, "idle", how)
            check_end(at, front.family)
        finally:
            front.close()


def test_one_that_is_continued_in_time_goes_on(tmp_path, monkeypatch):
    env, _ = environment(tmp_path, 1, "never", "kill gloo")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with private_folder() as folder:
        front = Front(folder, "idle")
        try:
            assert front.until(Ready), front.engine.poll()
            for pid in front.engine.pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(1.5)
            for pid in front.engine.pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep(6)
            front.ask()
            assert front.until(Tokens), front.engine.poll()
        finally:
            front.close()


def test_offline_one_that_is_stopped_ends_both(tmp_path):
    cases = ("load", "stop gloo"), ("decode", "stop deaf")
    check_all([Offline(tmp_path / phase, 1, phase, how) for phase, how in cases])


@pytest.mark.parametrize("how", ["gloo", "spinning"])
def test_ranks_end_that_hear_nothing_of_rank_0(tmp_path, how):
    """The user's own process is stopped, which nobody else may end."""
    case = Offline(tmp_path, 0, "decode", f"stop {how}")
    try:
        while not case.at.exists():
            case.family |= family(case.process.pid)
            assert case.process.poll() is None, case.said.read_text()
            time.sleep(0.1)
        (rank,) = (p for p in case.family if "spawn_main" in " ".join(p.cmdline()))
        while rank.status() != psutil.STATUS_ZOMBIE:  # which its stopped parent leaves it to be
            assert time.time() < float(case.at.read_text()) + LIMIT
            time.sleep(0.1)
        os.kill(case.process.pid, signal.SIGCONT)
        assert case.process.wait(LIMIT) != 0
        assert "rank 0 has left, or was stopped by a signal" in case.said.read_text()
    finally:
        case.end()


def test_a_session_that_is_suspended_as_a_whole_goes_on(tmp_path):
    case = Offline(tmp_path, 1, "never", "kill gloo", slow="load 0.5")
    try:
        while "loading" not in case.said.read_text():
            assert case.process.poll() is None, case.said.read_text()
            time.sleep(0.1)
        time.sleep(2)
        every = family(case.process.pid)
        for one in every:
            one.suspend()
        time.sleep(9)
        for one in every:
            one.resume()
        assert case.process.wait(90) == 0, case.said.read_text()
    finally:
        case.end()
