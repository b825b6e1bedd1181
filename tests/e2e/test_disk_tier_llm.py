"""Prompts find on disk what an engine before this one has computed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.errors import ConfigError

SETTINGS = {"platform": "cpu", "dtype": "float32", "threads": 1, "enable_hierarchical_cache": True}
GREEDY = SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True)
PROMPT = [random.Random(4).randrange(2, 258) for _ in range(130)]


def answer(llm, prompt=PROMPT, **more):
    (output,) = llm.generate(prompt, GREEDY, **more)
    return output.token_ids, [e.logprob for e in output.logprobs], output.usage.cached_by_tier


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_restart_keeps_what_was_cached(tiny, tmp_path, tokens):
    given = {**SETTINGS, "disk_cache": str(tmp_path / "cache")}
    with LLM(tiny, **given) as llm:
        llm.generate(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True))
        llm.flush_cache()
        cold = answer(llm)
        written = llm.stats().disk_written_bytes
    assert cold[2]["device"] == 0 and written > 0
    with LLM(tiny, **given) as llm:
        again = answer(llm)
        stats = llm.stats()
    assert again[2] == {"device": 0, "host": 0, "storage": 128}
    assert again[0] == cold[0] and again[1] == pytest.approx(cold[1], abs=1e-4)
    assert stats.cached_disk_tokens == 128 and stats.disk_read_bytes > 0


LOOP = """
    import sys
    from ds_runtime import LLM, SamplingParams
    from test_disk_tier_llm import PROMPT, SETTINGS

    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(sys.argv[1], **SETTINGS, disk_cache=sys.argv[2]) as llm:
        while True:
            for n in range(2, 250):
                llm.generate([n, *PROMPT], params)
"""


@pytest.mark.parametrize("pages", [1, 60, 200])
def test_an_engine_that_is_killed_leaves_what_another_may_read(tiny, tmp_path, pages):
    """Whatever it was writing. Two of them share the folder."""
    folder = tmp_path / "cache"
    command = [sys.executable, "-c", textwrap.dedent(LOOP), str(tiny), str(folder)]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    both = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) for _ in range(2)]
    until = time.monotonic() + 90
    while len(list(folder.glob("*/*.page"))) < pages:
        assert time.monotonic() < until and all(one.poll() is None for one in both)
        time.sleep(0.01)
    for one in both:
        one.send_signal(signal.SIGKILL)
        one.wait()
    with LLM(tiny, **SETTINGS) as llm:
        cold = [answer(llm, [n, *PROMPT[:120]]) for n in (2, 3, 9)]
    with LLM(tiny, **SETTINGS, disk_cache=str(folder)) as llm:
        again = [answer(llm, [n, *PROMPT[:120]]) for n in (2, 3, 9)]
    for mine, theirs in zip(again, cold, strict=True):
        assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], abs=1e-4)
    assert again[0][2]["storage"] == (112 if pages > 20 else again[0][2]["storage"])


def test_other_weights_find_nothing(tiny, tmp_path):
    """Nor does another page size."""
    given = {**SETTINGS, "disk_cache": str(tmp_path / "cache")}
    with LLM(tiny, **given) as llm:
        answer(llm)
    for more in ({"load_format": "dummy"}, {"page_size": 32}):
        with LLM(tiny, **given, **more) as llm:
            assert sum(answer(llm)[2].values()) == 0


def test_what_cannot_be(tiny, tmp_path):
    with pytest.raises(ConfigError, match="--enable-hierarchical-cache"):
        LLM(tiny, platform="cpu", disk_cache=str(tmp_path))
    with pytest.raises(ConfigError, match="--tp 2"):
        LLM(tiny, **SETTINGS, tp=2, disk_cache=str(tmp_path))
