"""A rank that dies, stops or is slow while sums overlap compute: everybody reads why, none is left."""

from __future__ import annotations

import pytest
from test_rank_death import Front, check_end, check_told, environment, plugin
from test_rank_stopped import ask

from ds_runtime.engine.messages import Ready, Tokens
from ds_runtime.engine.process.transport import private_folder

__all__ = ["plugin"]
pytestmark = pytest.mark.slow
HALVES = {"enable_two_batch_overlap": True, "dbo_prefill_token_threshold": 40}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("unstarted", "raise gloo"),
        ("unstarted", "kill deaf"),
        ("started", "kill gloo"),
        ("started", "stop gloo"),
        ("started", "stop holding"),
        ("started", "leave deaf"),
        ("unstarted", "sleep gloo"),
        ("started", "sleep gloo"),
    ],
)
def test_a_sum_is_under_way(tmp_path, monkeypatch, phase, rank, how):
    env, at = environment(tmp_path, rank, phase, how)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with private_folder() as folder:
        front = Front(folder, phase, **HALVES, dist_timeout=5)
        try:
            assert front.until(Ready), front.engine.poll()
            ask(front)
            assert not front.until(Tokens)
            print(front.engine.poll())
            check_told(front.engine.poll(), rank, phase, how.split()[0])
            check_end(at, front.family)
        finally:
            front.close()
