"""The whole engine on the null platform: it runs without maths, and cheaply."""

from __future__ import annotations

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.errors import ConfigError
from ds_runtime_bench.engine import host
from ds_runtime_kit.models.tiny import write_tiny


def test_64_running_requests_cost_little(tmp_path):
    write_tiny(tmp_path, "v3")
    report = host.run({"model": str(tmp_path)}, num_running=64, input_len=512, steps=100)
    assert report["running"] == 64 and report["input_len"] == 512
    assert report["steps"] == 100 and 0 < report["scheduler_ms"] < report["step_ms"]
    assert report["step_ms"] < 3, host.render(report)  # the median


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
