"""Steps that run as two halves answer as whole ones do, on ranks that are processes."""

from __future__ import annotations

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.engine.banner import banner

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": "2MB",
    "threads": 1,
    "tp": 2,
    "disable_graph": True,
}
HALVES = {"enable_two_batch_overlap": True, "dbo_prefill_token_threshold": 8}
LENGTHS = [3, 40, 1, 17, 90, 8]


def prompts(lengths=LENGTHS):
    return [[(7 * i + 11 * n) % 90 + 3 for n in range(length)] for i, length in enumerate(lengths)]


def answers(folder, **more):
    """(ids, log-probabilities of answers and prompts), twice: the second time prefixes are cached;
    and sums by kind."""
    params = [
        SamplingParams(
            max_tokens=6,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=1 if number == 4 else None,
        )
        for number in range(len(LENGTHS))
    ]
    with LLM(folder, **{**SETTINGS, **more}) as llm:
        found = llm.generate(prompts(), params)
        longer = [ids + [5, 9, 4] * 9 for ids in prompts()]
        found += llm.generate(longer, params)
        said = banner(llm._assembly, llm._engine.runner)
        return found, llm.stats().sums, said


def logprobs(entries):
    return [value for entry in entries if entry for value in [entry.logprob]]


def check_alike(found, whole):
    for one, other in zip(found, whole, strict=True):
        assert one.token_ids == other.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            mine, wanted = getattr(one, name), getattr(other, name)
            assert (mine is None) == (wanted is None)
            if mine is not None:
                assert logprobs(mine) == pytest.approx(logprobs(wanted), abs=2e-4)


@pytest.mark.parametrize(
    "more, own",
    [
        ({"chunked_prefill_size": 32}, {}),
        pytest.param({}, {"tbo_token_distribution_threshold": 0.0}, marks=pytest.mark.slow),
        pytest.param({"tp": 4}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_are_those_of_whole_steps(tiny, more, own):
    whole, kinds, said = answers(str(tiny), **more)
    assert {*kinds} == {"all_reduce"} and "two halves" not in said
    found, kinds, said = answers(str(tiny), **HALVES, **more, **own)
    assert kinds["all_reduce_async"] > 0 and kinds["all_reduce"] > 0, "decode steps are whole"
    assert "steps with 8 tokens of prompts or more run as two halves" in said
    check_alike(found, whole)


def test_one_prompt_is_divided_inside(tiny):
    one = [prompts()[4]]
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)
    found = []
    for own in ({}, HALVES):
        with LLM(str(tiny), **SETTINGS, **own) as llm:
            found.append(llm.generate(one, params))
            assert bool(llm.stats().sums.get("all_reduce_async")) == bool(own)
    check_alike(*found)


def test_what_divides_no_step_says_so(tiny):
    params, found = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1), []
    nothing = "--enable-two-batch-overlap changes nothing: there is one rank"
    for own in ({}, HALVES):
        with LLM(str(tiny), **{**SETTINGS, "tp": 1}, **own) as llm:
            assert (nothing in banner(llm._assembly, llm._engine.runner)) == bool(own)
            found.append(llm.generate(prompts()[:2], params))
    for one, other in zip(*found, strict=True):
        assert (one.token_ids, logprobs(one.logprobs)) == (
            other.token_ids,
            logprobs(other.logprobs),
        )
