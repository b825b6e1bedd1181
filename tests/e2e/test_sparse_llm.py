"""The whole engine with sparse attention against transformers: prefixes, preemption, chunks."""

from __future__ import annotations

import pytest
from test_parity_llm import CACHED, PARAMS, SETTINGS, check, prompts_of

from ds_runtime import LLM, SamplingParams
from ds_runtime_kit.models.oracle import Oracle
from ds_runtime_kit.models.tiny import write_tiny


@pytest.fixture(scope="module")
def v32(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v32")
    return folder, Oracle(write_tiny(folder, "v32", seed=11))


def test_together_in_chunks(v32):
    folder, oracle = v32
    with LLM(folder, **SETTINGS, chunked_prefill_size=33, max_step_tokens=64) as llm:
        check(oracle, llm.generate(prompts_of(oracle, (90, 23, 1)), PARAMS))


def test_prefix_hits(v32):
    """Cached pages bring their index keys, also those of prompts that were attended densely."""
    folder, oracle = v32
    first, short = prompts_of(oracle, (90, 20), seed=1)
    longer = short + prompts_of(oracle, (40,), seed=3)[0]
    with LLM(folder, **SETTINGS, page_size=4, chunked_prefill_size=24) as llm:
        told = llm.generate([first, short], CACHED)
        again = llm.generate([first, longer], CACHED)
    assert [o.usage.cached_tokens for o in again] == [88, 20]
    check(oracle, [*told, *again])


def test_after_preemption(v32):
    folder, oracle = v32
    prompts = prompts_of(oracle, (60, 61, 62, 63), seed=2)
    page = (48 + 32) * 4 * 3 * 8  # latent, rope and index key of 8 tokens in 3 layers
    small = {"context_length": 96, "kv_memory": page * 26, "page_size": 8}
    params = SamplingParams(max_tokens=30, logprobs=2, ignore_eos=True)
    with LLM(folder, **{**SETTINGS, **small}, disable_radix_cache=True) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().preemptions > 0
    check(oracle, outputs)
