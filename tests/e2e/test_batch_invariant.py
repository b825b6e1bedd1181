"""`--batch-invariant`: the same bits for a request, whatever else runs and however it is run.

On the demo model, whose draft layer is trained. Requests are compared with themselves alone, with
their log-probabilities as 32 bits each.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.offline.outputs import RequestOutput
from ds_runtime_kit.models.adapters import write_adapter
from ds_runtime_kit.models.answers import bits, check_coarse, check_float32, forced
from parts import is_deep, mostly_slow

SETTINGS: dict[str, Any] = {
    "platform": "cpu",
    "context_length": 512,
    "kv_memory": 24_000_000,
    "threads": 1,
    "max_running_requests": 12,
    "batch_invariant": True,
}
DRAFTS: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
COARSE_FIRST = pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float32"], 1))
LENGTHS = (1, 3, 16, 17, 40, 63, 64, 90, 130, 200)
REQUESTS = 12


def drawn(seed) -> tuple[list[int], SamplingParams]:
    """(prompt, how to sample), some of which begin alike."""
    draw = random.Random(seed)
    prompt = [draw.randrange(300, 2000) for _ in range(draw.choice(LENGTHS))]
    if seed % 3 == 0:
        prompt = [7 + i % 50 for i in range(draw.choice(LENGTHS))] + prompt[:20]
    return prompt, SamplingParams(
        max_tokens=draw.choice((1, 5, 14, 30)),
        temperature=draw.choice((0.0, 0.0, 0.7, 1.0)),
        top_p=draw.choice((1.0, 0.9)),
        seed=seed,
        logprobs=2,
        ignore_eos=True,
    )


def bits_of(output: RequestOutput) -> list[bytes]:
    """Of a result that was asked for log-probabilities."""
    assert output.logprobs is not None
    return bits(output.logprobs)


def answers(llm: LLM, numbers) -> tuple[list[list[bytes]], list[RequestOutput]]:
    """What the requests of these numbers are answered together."""
    asked = [drawn(number) for number in numbers]
    outputs = llm.generate([p for p, _ in asked], [s for _, s in asked])
    return [bits_of(output) for output in outputs], outputs


@cache
def alone(dtype):
    """Each request by itself, computed anew: its bits and its tokens."""
    found = []
    with LLM("demo", **SETTINGS, dtype=dtype, disable_radix_cache=True) as llm:
        for number in range(REQUESTS):
            (own,), (output,) = answers(llm, [number])
            found.append((own, output.token_ids))
    return found


def check_mixes(llm: LLM, dtype, count, seed=0, own=None, of=range(REQUESTS), most=10):
    """own: the bits of each request, if not those that one CPU gives alone. of: the numbers that
    mixes of up to `most` are drawn from."""
    draw, own = random.Random(seed), own or [alike for alike, _ in alone(dtype)]
    for _ in range(count):
        numbers = [draw.choice(of) for _ in range(draw.randint(1, most))]
        found, _ = answers(llm, numbers)
        for number, made in zip(numbers, found, strict=True):
            assert made == own[number], f"{number} of {numbers}"


WAYS: dict[str, dict[str, Any]] = {
    "prefix hits": {},
    "chunks": {"chunked_prefill_size": 13, "max_step_tokens": 29, "page_size": 8},
    "drafts": DRAFTS,
    "graphs off": {**DRAFTS, "disable_graph": True},
}
SHORT_ONES = [number for number in range(REQUESTS) if len(drawn(number)[0]) < 100]
CROWDED = {"context_length": 256, "page_size": 4}  # and memory for as many tokens
CROWD = {"of": SHORT_ONES, "most": 24}
MANY = 40 if is_deep() else 10  # mixes
FEW_AND_MANY = pytest.mark.parametrize("count", [2, pytest.param(MANY, marks=pytest.mark.slow)])
THREADS = {"two threads": {"threads": 2, "disable_radix_cache": True}}


@DTYPES
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.replace(" ", "-"))
def test_mixes(dtype, way):
    with LLM("demo", **{**SETTINGS, **WAYS[way]}, dtype=dtype) as llm:
        check_mixes(llm, dtype, 3)
        stats = llm.stats()
    assert stats.cached_tokens
    assert (stats.accepted_tokens > 0) == (way in ("drafts", "graphs off"))


@DTYPES
@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, *THREADS], ids=lambda way: way.replace(" ", "-"))
def test_many_mixes(dtype, way):
    """Two hundred of each dtype under the profile `deep`: forty of each way here."""
    settings = {**SETTINGS, **{**WAYS, **THREADS}[way], "dtype": dtype}
    with LLM("demo", **settings) as llm:
        check_mixes(llm, dtype, MANY, seed=len(way))


@DTYPES
@FEW_AND_MANY
def test_after_preemption(dtype, count):
    bytes_of = {"float32": 3_000_000, "bfloat16": 1_500_000}[dtype]  # of 256 tokens
    with LLM("demo", **{**SETTINGS, **CROWDED, "kv_memory": bytes_of}, dtype=dtype) as llm:
        check_mixes(llm, dtype, count, seed=3, **CROWD)
        everyone = SHORT_ONES * 2
        assert answers(llm, everyone)[0] == [alone(dtype)[number][0] for number in everyone]
        assert llm.stats().preemptions > 0


@DTYPES
def test_a_text_is_scored_as_it_was_sampled(dtype):
    """The log-probabilities of a prompt are, bit for bit, those with which it was drawn."""
    with LLM("demo", **SETTINGS, dtype=dtype, chunked_prefill_size=37) as llm:
        found, outputs = answers(llm, range(REQUESTS))
        assert [bits(scores) for scores in forced(llm, outputs, 2)] == found
        assert found == [own for own, _ in alone(dtype)]


@COARSE_FIRST
@FEW_AND_MANY
def test_two_ranks(dtype, count):
    """One rank's bits are not promised to two; theirs are their own."""
    pair = {**SETTINGS, "dtype": dtype, "tp": 2, "dist_timeout": 60}
    with LLM("demo", **pair, disable_radix_cache=True) as llm:
        first = [answers(llm, [number])[0][0] for number in range(REQUESTS)]
    for way in ({}, {**DRAFTS, "chunked_prefill_size": 13, "max_step_tokens": 29}):
        with LLM("demo", **{**pair, **way}) as llm:
            check_mixes(llm, dtype, -(-count // 2), seed=4 + len(way), own=first)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two of the demo model, of all but experts and of some modules, as flags."""
    folder, config = tmp_path_factory.mktemp("adapters"), assemble(EngineConfig(model="demo")).model
    wanted = {"a": ("proj", 8), "b": (("o_proj", "kv_b_proj", "down_proj"), 5)}
    for seed, (name, (ends, rank)) in enumerate(wanted.items()):

        def of(module, ends=ends):
            return module.endswith(ends) and ".mlp.experts." not in module

        write_adapter(folder / name, config, of, seed=seed, rank=rank)
    return tuple(f"{name}={folder / name}" for name in wanted)


@COARSE_FIRST
@FEW_AND_MANY
@pytest.mark.parametrize(
    "way", ["chunks", "drafts", "graphs off"], ids=lambda way: way.replace(" ", "-")
)
def test_adapters_in_a_batch(adapters, dtype, way, count):
    """Each request with an adapter or without one, beside requests of all others."""
    named = [(None, "a", "b")[number % 3] for number in range(REQUESTS)]
    settings = {**SETTINGS, "dtype": dtype, "lora": adapters}

    def told(llm, numbers):
        asked = [drawn(number) for number in numbers]
        prompts, params = zip(*asked, strict=True)
        names = [named[number] for number in numbers]
        return llm.generate(list(prompts), list(params), lora=names)

    with LLM("demo", **settings, disable_radix_cache=True) as llm:
        single = [told(llm, [number])[0] for number in range(REQUESTS)]
    own = [bits_of(output) for output in single]
    assert all(own[n] != alone(dtype)[n][0] for n in range(REQUESTS) if named[n])
    draw = random.Random(len(way))
    with LLM("demo", **{**settings, **WAYS[way]}) as llm:
        for _ in range(count):
            numbers = [draw.randrange(REQUESTS) for _ in range(draw.randint(2, 10))]
            made = [bits_of(output) for output in told(llm, numbers)]
            assert made == [own[number] for number in numbers], numbers


@DTYPES
def test_without_a_seed_tokens_vary_and_their_bits_do_not(dtype):
    """Each request draws a seed of its own; what is drawn is scored as ever, by any batch."""
    prompt = drawn(0)[0]
    free = SamplingParams(max_tokens=20, temperature=1.0, logprobs=2, ignore_eos=True)
    with LLM("demo", **SETTINGS, dtype=dtype) as llm:
        made = llm.generate([prompt] * 4, [free] * 4)
        assert len({tuple(output.token_ids) for output in made}) == 4
        scored = [bits(scores) for scores in forced(llm, made, 2)]
        assert scored == [bits_of(output) for output in made]


SHORT = SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True)
MODELS = [
    ("v2-lite", False, {}),
    ("odd", False, {"dtype": "float32"}),
    ("v3", True, {"kv_cache_dtype": "fp8"}),
    ("v3", False, {"quantize": "int4"}),
    ("v32", False, {}),
    ("v32", False, {"kv_cache_dtype": "fp8"}),
    ("glm", False, {"dtype": "float32"}),
]


@pytest.mark.parametrize(("shape", "fp8", "settings"), MODELS, ids=str)
def test_other_models(checkpoints, shape, fp8, settings):
    """Dense and sparse attention, weights and caches of few bits."""
    draw = random.Random(4)
    prompts = [[draw.randrange(2, 131) for _ in range(n)] for n in (70, 9, 33, 1, 120)]
    prompts.append(prompts[4][:64] + prompts[1])
    folder = checkpoints(shape, fp8)[0]
    given = {**SETTINGS, "dtype": "bfloat16", "page_size": 16, **settings}
    with LLM(folder, **given, chunked_prefill_size=29) as llm:
        single = [llm.generate(prompt, SHORT)[0] for prompt in prompts]
        own = [bits_of(output) for output in single]
        for _ in range(2):
            together = llm.generate(prompts * 2, [SHORT] * 12)
            assert [bits_of(output) for output in together] == own * 2
        assert [bits(scores) for scores in forced(llm, single, 2)] == own


def test_without_it_answers_are_alike():
    """Prompts attend expanded keys and values then."""
    greedy = SamplingParams(max_tokens=20, logprobs=2, ignore_eos=True)
    prompts = [drawn(number)[0] for number in range(REQUESTS)]
    with LLM("demo", **SETTINGS, dtype="float32") as llm:
        ours = llm.generate(prompts, greedy)
        with LLM("demo", **{**SETTINGS, "batch_invariant": False}, dtype="float32") as plain:
            theirs = plain.generate(prompts, greedy)
        check_float32(ours, theirs)
        check_coarse(ours, theirs, scored_by=llm)
