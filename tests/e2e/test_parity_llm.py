"""The whole engine against transformers: prompt log-probabilities and greedy tokens."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_runtime import LLM, SamplingParams
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime_kit.models.oracle import TIE, Oracle
from ds_runtime_kit.models.tiny import SHAPES

SETTINGS: dict[str, Any] = {
    "platform": "cpu",
    "dtype": "float32",
    "context_length": 256,
    "threads": 1,
}
SETTINGS |= {"kv_memory": "8MB"}
LENGTHS = (130, 64, 17, 1, 45)  # the original rope length of most shapes is 64
PARAMS = SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=2, ignore_eos=True)
CACHED = SamplingParams(max_tokens=20, logprobs=2, ignore_eos=True)
TOLERANCE = 1e-4


def prompts_of(oracle, lengths=LENGTHS, seed=0):
    return [oracle.draw_prompt(n, 1000 * seed + i) for i, n in enumerate(lengths)]


class Count:
    """Positions seen, and those left out because they hang on less than TIE."""

    def __init__(self):
        self.seen = self.tied = 0

    def check(self):
        print(f"{self.tied} of {self.seen} positions near a tie")
        assert self.tied <= 0.001 * self.seen


def check(oracle, outputs, tolerance=TOLERANCE):
    """Every log-probability that the results carry, and every greedy token; positions seen."""
    count = Count()
    compare(oracle, outputs, count, tolerance)
    count.check()
    return count.seen


def compare(oracle, outputs, count, tolerance=TOLERANCE):
    for output in outputs:
        prompt, made = output.prompt_token_ids, output.token_ids
        expected = oracle.logprobs(prompt + made)
        tied = oracle.near_tie(prompt + made)
        entries = [*(output.prompt_logprobs or [None] * len(prompt)), *output.logprobs]
        assert len(entries) == len(prompt) + len(made)
        assert (output.prompt_logprobs is None) or output.prompt_logprobs[0] is None
        for position, entry in enumerate(entries):
            if entry is None:
                continue
            row = expected[position - 1]
            count.seen += 1
            if tied[position - 1]:
                count.tied += 1
                continue
            if position >= len(prompt):
                assert entry.token == int(row.argmax()), f"position {position}"
            for token, value in [(entry.token, entry.logprob), *entry.top]:
                assert abs(value - float(row[token])) <= tolerance, f"position {position}"


@pytest.mark.parametrize("shape", SHAPES)
def test_alone_and_together(checkpoints, shape):
    folder, oracle = checkpoints(shape)
    prompts = prompts_of(oracle)
    with LLM(folder, **SETTINGS) as llm:
        together = llm.generate(prompts, PARAMS)
        single = [llm.generate(p, PARAMS)[0] for p in prompts[1:3]]
    assert check(oracle, together) == sum(LENGTHS) - len(LENGTHS) + 20 * len(LENGTHS)
    check(oracle, single)
    assert [o.token_ids for o in single] == [o.token_ids for o in together[1:3]]


SIZES: list[dict[str, Any]] = [
    {"chunked_prefill_size": 1, "page_size": 4},
    {"chunked_prefill_size": 7, "max_step_tokens": 16, "prefix_chunk": 5},
    {"chunked_prefill_size": 33, "page_size": 1},
    {"chunked_prefill_size": 64, "page_size": 64, "prefix_chunk": 50, "max_running_requests": 2},
]


@pytest.mark.parametrize("sizes", SIZES)
def test_chunks_and_pages(checkpoints, sizes):
    folder, oracle = checkpoints("v3")
    with LLM(folder, **SETTINGS, **sizes) as llm:
        check(oracle, llm.generate(prompts_of(oracle), PARAMS))


@pytest.mark.parametrize("shape", ["v2-lite", "v3"])
def test_prefix_hits(checkpoints, shape):
    """Prompts that share beginnings, a whole prompt again, and answers that became prompts."""
    folder, oracle = checkpoints(shape)
    first, second = prompts_of(oracle, (90, 70), seed=1)
    with LLM(folder, **SETTINGS, page_size=8, chunked_prefill_size=24) as llm:
        told = llm.generate([first, second], CACHED)
        asked = [first, first[:50] + second[:30], told[1].prompt_token_ids + told[1].token_ids]
        again = llm.generate(asked, CACHED)
    assert [o.usage.cached_tokens for o in again] == [88, 48, 88]
    check(oracle, [*told, *again])
    assert again[0].token_ids == told[0].token_ids


def test_after_preemption(checkpoints):
    folder, oracle = checkpoints("v3")
    prompts = prompts_of(oracle, (60, 61, 62, 63), seed=2)
    page = 48 * 4 * 3 * 8  # latent and rope of 8 tokens in 3 layers
    small = {"context_length": 96, "kv_memory": page * 26, "page_size": 8}
    params = SamplingParams(max_tokens=30, logprobs=2, ignore_eos=True)
    with LLM(folder, **{**SETTINGS, **small}, disable_radix_cache=True) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats().preemptions > 0
    check(oracle, outputs)


def test_fp8(checkpoints):
    """In float32 the blocks are exact: no other tolerance than for any other weights."""
    folder, oracle = checkpoints("v2", fp8=True)
    with LLM(folder, **SETTINGS, chunked_prefill_size=40) as llm:
        check(oracle, llm.generate(prompts_of(oracle), PARAMS))


def errors(oracle, outputs, made=False):
    """|log-probability − exact| of every prompt token that has one; `made`: of answers, too."""
    for output in outputs:
        prompt = output.prompt_token_ids
        exact = oracle.logprobs(prompt + output.token_ids if made else prompt)
        entries = [*(output.prompt_logprobs or [None] * len(prompt))]
        for position, entry in enumerate([*entries, *(output.logprobs if made else ())]):
            if entry is not None:
                yield abs(entry.logprob - float(exact[position - 1, entry.token]))


def errors_in_bfloat16(oracle, prompts):
    """The same of transformers."""
    coarse = Oracle(copy.deepcopy(oracle.model).bfloat16())
    for tokens in prompts:
        gap = coarse.logprobs(tokens).float() - oracle.logprobs(tokens)
        yield from (abs(float(gap[i, tokens[i + 1]])) for i in range(len(tokens) - 1))


@pytest.mark.parametrize("fp8", [False, True])
def test_bfloat16(checkpoints, fp8):
    """Stated tolerance in 16 bits: a mean error of at most 1.3 × that of transformers' bfloat16."""
    folder, oracle = checkpoints("v3", fp8=fp8)
    prompts = prompts_of(oracle)
    with LLM(folder, **{**SETTINGS, "dtype": "bfloat16"}) as llm:
        ours = list(errors(oracle, llm.generate(prompts, PARAMS)))
    theirs = list(errors_in_bfloat16(oracle, prompts))
    assert len(ours) == len(theirs)
    assert sum(ours) <= 1.3 * sum(theirs)
    assert sum(theirs) / len(theirs) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "fp8"),
    [*((s, False) for s in SHAPES), *((s, True) for s in SHAPES if s != "odd")],
)
def test_matrix(checkpoints, shape, fp8):
    """Every shape with every size and long random company. Half-split rotation has no FP8 form."""
    folder, oracle = checkpoints(shape, fp8)
    draw, count = random.Random(5), Count()
    for seed, sizes in enumerate(SIZES):
        lengths = [draw.randint(1, 200) for _ in range(6)]
        prompts = prompts_of(oracle, lengths, seed=10 + seed)
        with LLM(folder, **{**SETTINGS, "kv_memory": "2MB"}, **sizes) as llm:
            compare(oracle, llm.generate(prompts, PARAMS), count)
            compare(oracle, llm.generate(prompts, CACHED), count)
    count.check()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "ranks"), [("v2-lite", 2), ("v3", 4)])
def test_ranks(checkpoints, shape, ranks):
    folder, oracle = checkpoints(shape, fp8=True)
    with LLM(folder, **SETTINGS, tp=ranks, chunked_prefill_size=30, dist_timeout=60) as llm:
        check(oracle, llm.generate(prompts_of(oracle), PARAMS))


def test_ties_are_found(checkpoints):
    """The oracle's own measure: two equal head rows make their tokens tie wherever they win."""
    _, oracle = checkpoints("v2-lite")
    model = copy.deepcopy(oracle.model)
    with torch.no_grad():
        model.lm_head.weight[6] = model.lm_head.weight[5] = model.lm_head.weight[5] * 10
    tied = Oracle(model).near_tie(list(range(60)))
    assert 0 < int(tied.sum()) < 60 and TIE == 1e-5


def test_the_demo_model():
    """Trained weights at the true head sizes, on text."""
    folder = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    oracle = Oracle(model.eval())
    params = SamplingParams(max_tokens=40, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    texts = ["It is a truth universally acknowledged, that a", "What is 17 + 25?", "Call me"]
    with LLM("demo", **SETTINGS, chunked_prefill_size=5) as llm:
        outputs = llm.generate(texts, params)
    check(oracle, outputs)
