"""Drafts change how fast answers come and nothing else: float32, token for token.

On the demo model, whose draft layer is trained and right about half of the time.
"""

from __future__ import annotations

import json

import pytest
from ahead import engine
from msgspec import structs

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.common.speculation import Speculation
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.messages import Submit
from ds_runtime.output_rules import OutputRules
from ds_runtime.parallel.world import World

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "context_length": 256,
    "kv_memory": 24_000_000,
    "threads": 1,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "max_step_tokens": 64,
}
NEXTN = {"speculative_algorithm": "NEXTN"}
PARAMS = (
    {"max_tokens": 32},
    {"max_tokens": 1},
    {"max_tokens": 2, "temperature": 1.0},
    {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"max_tokens": 24, "frequency_penalty": 0.6, "repetition_penalty": 1.2, "logprobs": 0},
    {"max_tokens": 20, "min_tokens": 9, "stop_token_ids": tuple(range(300, 500))},
    {"max_tokens": 20, "prompt_logprobs": 1, "presence_penalty": 0.5},
    {"max_tokens": 20, "logit_bias": {40: 6.0}, "temperature": 1.2, "min_p": 0.05},
    {"max_tokens": 24, "stop": ("e", "and")},
    {"max_tokens": None, "temperature": 0.5, "top_k": 20},
)


def asked(llm):
    texts = ("What is 12 + 30?", "Once upon a time there was a ship", "7", "the the the the")
    prompts, params = [], []
    for i, values in enumerate(PARAMS):
        ids = llm.tokenizer.encode(texts[i % len(texts)])
        prompts.append(ids * (1 + 5 * (i % 3)))
        params.append(SamplingParams(seed=i, **{"ignore_eos": i % 2 == 0, **values}))
    return prompts, params


def answers(**settings):
    with LLM("demo", **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate(*asked(llm))
        outputs += llm.generate(*asked(llm))  # now from the prefix cache
        found = [(o.token_ids, o.text, o.finish_reason) for o in outputs]
        return found, [o.logprobs for o in outputs], llm.stats()


@pytest.fixture(scope="module")
def plain():
    return answers()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculative_num_draft_tokens": 6, "disable_radix_cache": True},
        {"kv_memory": 12_000_000, "page_size": 8, "policy": "priority"},
        {"kv_cache_dtype": "float32", "max_step_tokens": 9, "prefix_chunk": 16},
        {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7, "page_size": 4},
    ],
    ids=str,
)
def test_answers_are_those_without(plain, settings):
    found, logprobs, stats = answers(**NEXTN, **settings)
    assert found == plain[0]
    for ours, theirs in zip(logprobs, plain[1], strict=True):
        assert [x.token for x in ours or ()] == [x.token for x in theirs or ()]
        assert [x.logprob for x in ours or ()] == pytest.approx(
            [x.logprob for x in theirs or ()], abs=1e-4
        )
    assert 0.1 < stats.accepted_tokens / stats.draft_tokens < 0.9
    # Stop strings are found beside the engine, which counts all that a verification gave.
    steps = Speculation.of(EngineConfig(**NEXTN, **settings)).steps
    behind = stats.generated_tokens - plain[2].generated_tokens
    assert 0 <= behind <= steps * sum("stop" in p for p in PARAMS)
    assert stats.steps < plain[2].steps or settings.get("max_step_tokens") == 9


def shortened(params, most):
    return structs.replace(params, max_tokens=min(params.max_tokens or most, most))


TREE = {**NEXTN, "speculative_eagle_topk": 3, "speculative_num_steps": 2}


@pytest.mark.parametrize(("temperature", "drafting"), [(0.0, NEXTN), (1.0, NEXTN), (0.6, TREE)])
def test_structured_answers_are_those_without(temperature, drafting):
    """Masks behind drafts: the grammar of a draft that does not fit is never asked for more."""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    found = []
    for settings in ({}, drafting):
        with LLM("demo", **{**SETTINGS, **settings}) as llm:
            ids = llm.tokenizer.encode("What is 12 + 30?")
            rules = OutputRules(json_schema=json.dumps(schema))
            params = SamplingParams(max_tokens=20, temperature=temperature, seed=4, rules=rules)
            plain = SamplingParams(max_tokens=20, seed=5)
            outputs = llm.generate([ids, ids * 2, ids], [params, plain, params])
            found.append([(o.token_ids, o.finish_reason) for o in outputs])
            alone = llm.stats()
            assert llm.generate([ids], [params])[0].token_ids == outputs[0].token_ids
            guided = llm.stats()
    assert found[1] == found[0]
    assert guided.accepted_tokens > alone.accepted_tokens  # of the guided request by itself


@pytest.fixture(scope="module", params=[NEXTN, TREE], ids=("chain", "tree"))
def runner(request):
    settings = {**SETTINGS, **request.param}
    made = Runner(assemble(EngineConfig(**settings), settings), World.alone(), poison=True)
    made.warm_up()
    return made


def test_overlap_and_aborts(runner):
    """Steps behind a verification wait for it, those behind a prompt do not."""
    plain = Runner(assemble(EngineConfig(**SETTINGS), SETTINGS), World.alone(), poison=True)
    plain.warm_up()
    found = [overlapped(plain, False), overlapped(runner, False), overlapped(runner, True)]
    assert found[2][0] == found[1][0] == found[0][0]
    assert all(drafts > 0 for _, drafts in found[1:])


def overlapped(runner, ahead):
    """Tokens of six requests, one of which is aborted; and how many drafts were right."""
    made = engine(runner, ahead)
    for i in range(6):
        params = SamplingParams(max_tokens=25, ignore_eos=True, temperature=i % 2)
        prompt = [40 + i, 90, 5] * (1 + 9 * (i % 2))
        made.submit(Submit(rid=str(i), prompt=prompt, params=params, seed=i))
    tokens = {str(i): [] for i in range(6)}
    while made.has_work:
        for message in made.step():
            tokens[message.rid] += message.tokens
        if len(tokens["1"]) > 9 and "2" in tokens:
            made.abort(["2"])
            del tokens["2"]
    assert all(len(ids) == 25 for ids in tokens.values()) and len(tokens) == 5
    holdings = made.scheduler.holdings
    assert holdings.num_free + holdings.num_cached == runner.num_pages, "a page is lost"
    accepted = made.stats().accepted_tokens
    made.close()
    return tokens, accepted


@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True])
def test_two_ranks_draft_and_verify_alike(plain, divided):
    """By heads, and by sequences: then each drafts for its own."""
    found, _, stats = answers(**NEXTN, tp=2, enable_dp_attention=divided)
    assert found == plain[0]
    assert stats.accepted_tokens > 0.25 * stats.draft_tokens
