"""A rank that dies, stops or is slow while sums overlap compute: everybody reads why, and ends."""

from __future__ import annotations

import pytest
from test_rank_death import Front, check_end, check_told, environment, plugin

from ds_runtime.engine.messages import Ready, Tokens
from ds_runtime.engine.process.transport import private_folder

__all__ = ["plugin"]
pytestmark = pytest.mark.slow
HALVES = {"enable_two_batch_overlap": True, "dbo_prefill_token_threshold": 40}
TIMEOUT = 5  # seconds for which ranks wait for one that is slow


def check(tmp_path, monkeypatch, phase, rank, how, **more):
    """All ranks end in time, and the front end reads which one was the cause."""
    env, at = environment(tmp_path, rank, phase, how)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    how = how.split()[0]
    with private_folder() as folder:
        front = Front(folder, phase, dist_timeout=TIMEOUT if how == "sleep" else 60, **more)
        try:
            assert front.until(Ready), front.engine.poll()
            front.ask()
            assert front.until(Tokens) is (phase == "decode")
            assert not front.until(())
            check_told(front.engine.poll(), rank, phase, how)
            check_end(at, front.family)
        finally:
            front.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("phase", "how"),
    [  # the others have started a sum that it has not, or it has, too, and waits for none
        ("unstarted", "raise gloo"),
        ("unstarted", "kill deaf"),
        ("unstarted", "sleep gloo"),
        ("started", "kill gloo"),
        ("started", "stop holding"),
        ("started", "leave deaf"),
        ("started", "sleep gloo"),
    ],
)
def test_a_sum_is_under_way(tmp_path, monkeypatch, phase, rank, how):
    check(tmp_path, monkeypatch, phase, rank, how, **HALVES)


@pytest.mark.parametrize(("phase", "rank"), [("prefill", 1), ("decode", 0)])
def test_a_slow_rank_is_named_in_whole_steps_too(tmp_path, monkeypatch, phase, rank):
    check(tmp_path, monkeypatch, phase, rank, "sleep gloo")
