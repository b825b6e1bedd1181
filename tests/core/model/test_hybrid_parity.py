"""DeepSeek-V4 through the real engine against transformers: every log-probability to 1e-4."""

from __future__ import annotations

import random

import pytest
from hybrid_models import BASE, HybridOracle, drawn

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.offline.llm import LLM
from ds_runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=14, logprobs=0, ignore_eos=True)
SCORED = SamplingParams(max_tokens=14, logprobs=0, prompt_logprobs=0, ignore_eos=True)
SETTINGS = {"platform": "cpu", "dtype": "float32", "threads": 1, "context_length": 512}


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """(folder, oracle) of six layers of all kinds."""
    folder, oracle = tmp_path_factory.mktemp("six"), HybridOracle(BASE, seed=1)
    oracle.model.save_pretrained(folder)
    return str(folder), oracle


def compare(oracle, prompts, outputs, scored=True, least=0.5):
    found = [oracle.worst(p, o, scored) for p, o in zip(prompts, outputs, strict=True)]
    clear = [error for error in found if error is not None]
    assert len(clear) >= least * len(found), "hardly an answer has clear choices"
    assert max(clear) < 1e-4


@pytest.mark.parametrize("seed", range(8))
def test_random_models(tmp_path, seed):
    """In batches, with chunks of any size, over pages of 128 and 256 tokens."""
    oracle, draw = HybridOracle(drawn(seed), seed), random.Random(seed)
    oracle.model.save_pretrained(tmp_path)
    prompts = [oracle.prompt(n, seed) for n in (1, 3, 4, 60, 140, 258)]
    chunk = draw.choice([7, 32, 127, 400])
    more = {"chunked_prefill_size": chunk, "max_running_requests": draw.choice([1, 3, 8])}
    with LLM(tmp_path, **SETTINGS, **more, page_size=draw.choice([128, 256])) as llm:
        compare(oracle, prompts, llm.generate(prompts, SCORED))


def test_all_kinds_of_layers_at_once(six):
    folder, oracle = six
    prompts = [oracle.prompt(n, n) for n in (2, 100, 127, 128, 129, 300)]
    with LLM(folder, **SETTINGS, chunked_prefill_size=64) as llm:
        compare(oracle, prompts, llm.generate(prompts, SCORED))


def test_a_prompt_goes_on_from_a_snapshot(six):
    """At the last page boundary that it does not fill, and behind an answer; else from the start,
    and without a snapshot always."""
    folder, oracle = six
    base = oracle.prompt(290, 7)
    others = [[*base, 5, 6, 7], [*base[:140], 9, 9], [*base[:257], *oracle.prompt(40, 8)]]
    for snapshots, hits in ((8, [256, 128, 256]), (0, [0, 0, 0])):
        with LLM(folder, **SETTINGS, state_snapshots=snapshots, chunked_prefill_size=100) as llm:
            (first,) = llm.generate([base], GREEDY)
            assert first.usage.cached_tokens == 0
            llm.generate([base[:130]], GREEDY)  # leaves a snapshot at its first page
            for prompt, hit in zip(others, hits, strict=True):
                (output,) = llm.generate([prompt], GREEDY)
                assert output.usage.cached_tokens == hit
                compare(oracle, [prompt], [output], scored=False, least=0)
            turn = [*base, *first.outputs[0].token_ids, *oracle.prompt(90, 9)]
            outputs = llm.generate([turn, [*turn, 3]], GREEDY)
            compare(oracle, [turn, [*turn, 3]], outputs, scored=False, least=0)


def test_whoever_is_preempted_answers_the_same(six):
    folder, oracle = six
    given = {**SETTINGS, "max_running_requests": 4, "state_snapshots": 0}
    sizes = assemble(EngineConfig(model=folder, **given)).cache_sizes
    prompts = [oracle.prompt(n, n) for n in (120, 121, 122, 123)]
    memory = 5 * sizes.state + 6 * sizes.page
    with LLM(folder, **given, kv_memory=memory, disable_radix_cache=True) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=250, logprobs=0, ignore_eos=True))
        assert llm.stats().preemptions > 0
        compare(oracle, prompts, outputs, scored=False)
