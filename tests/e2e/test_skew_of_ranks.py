"""Of ranks that are processes, one computes slowly: the metrics name it, and say by how much."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.engine.device.waits import EVERY

SETTINGS = {
    "platform": "dawdling",
    "dtype": "float32",
    "kv_memory": "2MB",
    "threads": 1,
    "tp": 2,
}
TOKENS = 4 * EVERY + 2


@pytest.fixture
def dawdling(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))
    import dawdling

    yield dawdling
    del sys.modules["dawdling"]


@pytest.mark.parametrize(("slow", "captured"), [(0, False), (1, False), (1, True)])
def test_the_slow_rank_is_named(tiny, dawdling, monkeypatch, slow, captured):
    monkeypatch.setenv("DAWDLES", str(slow))
    with LLM(tiny, extra_plugins=[dawdling], disable_graph=not captured, **SETTINGS) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        stats = llm.stats()
        crossing, layers = Crossing.of(llm._assembly), llm._assembly.model.layers
    pauses = crossing.summed(1, layers)[1] * dawdling.PAUSE
    assert stats.skew_steps >= 4
    late = stats.rank_late
    assert max(late, key=late.get) == slow
    assert stats.skew_seconds / stats.skew_steps == pytest.approx(pauses, rel=0.5)
    assert late[slow] - late[1 - slow] > 0.5 * pauses * stats.skew_steps


def test_one_rank_has_no_skew(tiny):
    alone = SETTINGS | {"platform": "cpu", "tp": 1}
    with LLM(tiny, **alone) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        stats = llm.stats()
    assert (stats.skew_steps, stats.skew_seconds, stats.rank_late) == (0, 0.0, {})
