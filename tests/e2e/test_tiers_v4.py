"""DeepSeek-V4 over host memory and disk: its pages and its snapshots of states travel together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import ds_runtime
from ds_runtime import LLM, SamplingParams

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "threads": 1,
    "context_length": 768,
    "max_running_requests": 2,
    "kv_memory": "3MB",
}
DEMO = Path(ds_runtime.__file__).parent / "demo"
ROOM = "370KB"
GREEDY = SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True)


def sessions():
    draw = random.Random(3)
    return [[draw.randrange(2, 250) for _ in range(500)] for _ in range(3)]


def answers(llm, prompts):
    """(tokens, log-probabilities) and where cached tokens were, of one prompt after the other."""
    found = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    said = [(o.token_ids, [e.logprob for e in o.logprobs]) for o in found]
    return said, [o.usage.cached_by_tier for o in found]


def behind(said):
    """The sessions' next turns."""
    return [
        [*prompt, *tokens, 7, 8, 9] for prompt, (tokens, _) in zip(sessions(), said, strict=True)
    ]


@pytest.fixture(scope="module")
def computed(chat_v4):
    """Both turns, without any cache."""
    with LLM(chat_v4, **SETTINGS, disable_radix_cache=True) as llm:
        first, _ = answers(llm, sessions())
        return first, answers(llm, behind(first))[0]


def same(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
def test_sessions_return_from_host_memory_and_from_the_disk(chat_v4, computed, tmp_path, tp):
    """As if they had been computed; the device has room for one of them."""
    first, second = computed
    given = {**SETTINGS, "tp": tp, "enable_hierarchical_cache": True, "hicache_ratio": 8.0}
    given |= {"disk_cache": str(tmp_path / "cache"), "state_snapshots": 2}
    given["kv_memory"] = ROOM  # some nine pages
    with LLM(chat_v4, **given) as llm:
        said, cached = answers(llm, sessions())
        same(said, first)
        assert all(sum(tiers.values()) == 0 for tiers in cached)
        said, cached = answers(llm, behind(first))
        same(said, second)
    assert [tiers["storage"] for tiers in cached] == [0] * 3
    assert sum(tiers["host"] for tiers in cached) >= 2 * 384
    assert {path.suffix for path in (tmp_path / "cache").glob("*/*")} == {".page", ".state"}
    with LLM(chat_v4, **given) as llm:
        said, cached = answers(llm, behind(first))
        same(said, second)
    assert min(tiers["storage"] for tiers in cached) >= 384, cached
