"""The whole engine on the null platform: it runs without maths, and cheaply."""

from __future__ import annotations

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.bench import host
from ds_runtime.errors import ConfigError


def test_64_running_requests_cost_little(tiny):
    report = host.run({"model": str(tiny)}, num_running=64, input_len=20, steps=50)
    assert report["steps"] == 50 and 0 < report["scheduler_ms"] < report["step_ms"]
    # 3 ms is the budget on an idle machine; test machines are busy.
    assert report["step_ms"] < 9, host.render(report)


def test_contexts_that_are_too_short_are_said(tiny):
    with pytest.raises(ConfigError, match=r"full after \d+ of 500 .* --input-len"):
        host.run({"model": str(tiny)}, num_running=2, input_len=20, steps=500)


def test_null_generates_the_same_junk_for_the_same_seed(tiny):
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
    with LLM(str(tiny), platform="null", plugins=("null",)) as llm:
        alone = llm.generate([[5, 6, 7]], params)[0].token_ids
        many = llm.generate([[5, 6, 7]] * 9, params)
        assert all(o.token_ids == alone for o in many) and len(set(alone)) > 4
        assert llm.plan.heavy_references() == []
