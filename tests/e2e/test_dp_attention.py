"""Attention divided by sequences among real ranks over Gloo: the answers of one rank, whatever lies
where.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from served import serving
from test_lora_llm import Adapted
from test_parity_llm import SETTINGS as PARITY
from test_parity_llm import check, errors, prompts_of

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.errors import ConfigError, RequestError
from ds_runtime_kit.models.answers import check_float32
from ds_runtime_kit.models.oracle import Oracle
from ds_runtime_kit.models.tiny import write_tiny, write_tiny_fp8
from tiny_models import byte_prompts

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": "2MB",
    "threads": 1,
    "dist_timeout": 60,
    "chunked_prefill_size": 24,
    "max_step_tokens": 60,
    "max_running_requests": 12,
}
DIVIDED = {"tp": 2, "enable_dp_attention": True}
GROUPS = {"tp": 4, "dp": 2, "enable_dp_attention": True}  # heads are divided inside each
BOTH = pytest.mark.parametrize("divided", [DIVIDED, GROUPS], ids=("ranks", "groups"))
EXTRAS = (
    {"logprobs": 2},
    {},
    {"temperature": 0.8, "seed": 3},
    {"logprobs": 1, "prompt_logprobs": 1},
    {"frequency_penalty": 0.8, "presence_penalty": 0.2},
    {"temperature": 1.0, "top_p": 0.9, "seed": 1, "repetition_penalty": 1.2},
    {"min_tokens": 5, "stop_token_ids": tuple(range(2, 99))},
    {"rules": OutputRules(regex="(a|bc){20,30}"), "temperature": 1.0, "seed": 9},
    {"rules": OutputRules(choice=("alpha", "beta"))},
    {"logit_bias": {9: 3.0}, "n": 3, "temperature": 0.7, "seed": 5},
    {"stop": ("a", "b", "c"), "temperature": 1.0, "seed": 8},
)


def prompts(count, seed=5, longest=80):
    return byte_prompts(count, seed, longest)


def params(count):
    lengths = (30, 12, 1, 40, 25, 9, 50, 33, 60, 20, 40)
    return [SamplingParams(max_tokens=lengths[i], **EXTRAS[i]) for i in range(count)]


def answers(outputs):
    return [[(c.token_ids, c.text, c.finish_reason) for c in o.outputs] for o in outputs]


def same(outputs, expected):
    assert answers(outputs) == answers(expected)
    check_float32(outputs, expected)


def ask(llm):
    """Mixed batches, more and fewer sequences than ranks, prefixes, and what is left early."""
    found = llm.generate(prompts(11), params(11)) + llm.generate(prompts(1), params(1))
    cached = llm.generate([[*p, 7, 8] for p in prompts(5)], params(5))
    assert [o.usage.cached_tokens for o in cached] == [80, 64, 0, 0, 32]
    left = llm.stream(prompts(1, 9)[0], SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(4):
        next(left)
    found += llm.generate(prompts(3, 6), params(3))
    left.close()
    guided = [SamplingParams(max_tokens=30, **EXTRAS[i]) for i in (7, 1, 8)]
    found += llm.generate(prompts(3, 4, 20), guided)
    return found + cached + llm.generate(prompts(4, 7), params(4))


@pytest.fixture(scope="module")
def alone(tiny):
    with LLM(tiny, **SETTINGS) as llm:
        return ask(llm)


@pytest.mark.parametrize(
    ("tp", "dp"),
    [
        (2, None),
        pytest.param(4, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(4, None, marks=pytest.mark.slow),
    ],
)
def test_mixed_batches_give_what_one_rank_gives(tiny, alone, tp, dp):
    with LLM(tiny, **SETTINGS, tp=tp, dp=dp, enable_dp_attention=True) as llm:
        same(ask(llm), alone)
        dp = dp or tp
        stats, most = llm.stats(), 2_000_000 // (40 * 4 * 3 * 16)
        assert stats.pages_total == dp * most, "as many in each group as one rank alone has"
        each = "ranks" if dp == tp else "groups of 2 ranks"
        assert f"{most} pages of 16 on each of {dp} {each}" in llm.banner
        llm.flush_cache()
        assert llm.stats().pages_free == stats.pages_total, "a page is lost"
        assert (llm.plan.tp, llm.plan.attn_dp) == (tp, dp)


def test_little_memory_is_divided_by_sequences(tiny):
    """Five of seven pages are one context: two ranks hold twice as many; each preempts its own."""
    small = {**SETTINGS, "context_length": 80, "kv_memory": 7 * 40 * 4 * 3 * 16}
    long = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)
    asked = prompts(7, 3, 39)
    with LLM(tiny, **small) as llm:
        expected, one = llm.generate(asked, long), llm.stats()
    with LLM(tiny, **small, **DIVIDED) as llm:
        same(llm.generate(asked, long), expected)
        two = llm.stats()
        with pytest.raises(RequestError, match="the context 80"):
            llm.generate([list(range(2, 90))])
    assert (one.pages_total, two.pages_total) == (7, 14)
    assert two.preemptions > 0 and two.steps < 0.7 * one.steps


@pytest.mark.parametrize("shape", ["v2-fp8", "v32", pytest.param("v3", marks=pytest.mark.slow)])
def test_log_probabilities_are_those_of_transformers(tmp_path, shape):
    name, _, fp8 = shape.partition("-")
    oracle = Oracle((write_tiny_fp8 if fp8 else write_tiny)(tmp_path, name, seed=11))
    scored = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    with LLM(tmp_path, **PARITY, **DIVIDED, chunked_prefill_size=33) as llm:
        check(oracle, llm.generate(prompts_of(oracle, (90, 23, 1, 45, 60)), scored))
        check(oracle, llm.generate(prompts_of(oracle, (70,)), scored))


@pytest.fixture(scope="module")
def exact(tiny):
    """transformers in float32 and in float64."""
    from transformers import DeepseekV3ForCausalLM

    oracle = Oracle(DeepseekV3ForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval())
    double = copy.copy(oracle)
    double.model = oracle.double
    return oracle, double


def check_exact(exact, outputs):
    """They are as near float64 as transformers in float32 is, of the same tokens."""
    oracle, double = exact
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    theirs = torch.cat([(oracle.logprobs(t) - double.logprobs(t)).abs().flatten() for t in texts])
    ours = torch.tensor([*errors(double, outputs, made=True)])
    assert len(ours) > 300
    assert ours.mean() <= 1.3 * theirs.mean() and ours.max() <= theirs.max()


@pytest.mark.slow
@BOTH
def test_captured_and_overlapped_steps(tiny, alone, exact, recorded, divided):
    """Their sums are in another order than one rank's: float64 judges."""
    settings = {**SETTINGS, **divided, "platform": "recorded", "plugins": ()}
    settings |= {"graph_sizes": (2, 8), "prefill_graph_sizes": (12, 60)}
    with LLM(tiny, extra_plugins=[recorded], **settings) as llm:
        replays = llm._assembly.platform.backend.replays
        pieces, rest = 2 * (llm._assembly.model.layers + 1), 4
        assert len(replays) == pieces + rest, "a step and a draw behind masks per size"
        assert not any(replays)
        found = ask(llm)
        assert answers(found) == answers(alone)
        scored = [output for output in found if output.logprobs]
        check_exact(exact, scored)
        # Where few rows are wanted, these are computed in place of the last piece: ask for all.
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
        for length in (8, 40):
            llm.generate([list(range(2, 2 + length))], scored)
        assert all(replays[:pieces]), "every piece of either size"
        assert all(replays[pieces::2]) and any(replays[pieces + 1 :: 2])


@pytest.mark.slow
@BOTH
def test_adapters_in_captured_steps(tiny, tmp_path, recorded, divided):
    """Whole beside attention, cut beside FFNs; one is loaded into steps that are captured."""
    adapted = Adapted(tiny, tmp_path)
    settings = {**SETTINGS, **divided, "platform": "recorded", "plugins": (), "graph_sizes": (4,)}
    settings["prefill_graph_sizes"] = (60,)
    slots = {"lora": adapted.flags("a"), "max_loras": 2, "max_lora_rank": 8}
    asked, scored = prompts(6, 1, 60), SamplingParams(max_tokens=10, logprobs=0)
    with LLM(tiny, extra_plugins=[recorded], **settings, **slots) as llm:
        llm.load_lora_adapter("b", adapted.folders["b"])
        for names in (["a", None, "b", "b", "a", None], [None] * 5 + ["b"], [None] * 6):
            adapted.check(llm.generate(asked, scored, lora=names), names)
        replays = llm._assembly.platform.backend.replays
        assert replays[0] > 2 and replays[llm._assembly.model.layers + 1] > 20


@pytest.mark.slow
@BOTH
def test_adapters_of_routed_experts(tiny, tmp_path, divided):
    adapted = Adapted(tiny, tmp_path)
    asked, scored = prompts(6, 1, 60), SamplingParams(max_tokens=10, logprobs=0)
    with LLM(tiny, **SETTINGS, **divided, lora=adapted.flags("e")) as llm:
        names = ["e", None, None, "e", "e", None]
        adapted.check(llm.generate(asked, scored, lora=names), names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"page_size": 4, "chunked_prefill_size": 1}, 1e-4),
        ({"disable_radix_cache": True, "prefix_chunk": 5}, 1e-4),
        ({"kv_cache_dtype": "fp8"}, 5e-3),  # what is near the middle of two codes
    ],
    ids=str,
)
def test_other_settings_give_what_one_rank_gives(tiny, settings, tolerance):
    """A coarse cache rounds what ranks sum in another order, so only first tokens are compared."""
    found = []
    for layout in ({}, GROUPS):
        with LLM(tiny, **{**SETTINGS, **settings, **layout}) as llm:
            found.append(llm.generate(prompts(9), SamplingParams(max_tokens=12, logprobs=0)))
    if tolerance == 1e-4:
        same(found[1], found[0])
    firsts = [[o.logprobs[0].logprob for o in outputs] for outputs in found]
    assert firsts[1] == pytest.approx(firsts[0], abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "divided"),
    [
        ({"dtype": "bfloat16"}, GROUPS),
        # Each rank rounds its own part of a weight: the more ranks, the more scales.
        ({"quantize": "int8", "dtype": "bfloat16"}, DIVIDED),
    ],
    ids=str,
)
def test_coarse_numbers_are_as_near_to_float32_as_one_rank_s(tiny, settings, divided):
    """Ranks round otherwise than one does, so both stand beside the same weights in float32."""
    scored, found = SamplingParams(max_tokens=1, prompt_logprobs=0), []
    for given in ({}, settings, settings | divided):
        with LLM(tiny, **{**SETTINGS, **given}) as llm:
            outputs = llm.generate(prompts(9), scored)
        found.append([t.logprob for o in outputs for t in o.prompt_logprobs if t is not None])
    exact, one, several = (torch.tensor(values, dtype=torch.float64) for values in found)
    assert len(exact) > 200
    assert (several - exact).square().mean() < 1.2**2 * (one - exact).square().mean()


@pytest.mark.slow
def test_over_http_with_the_demo_model():
    flags = ("--tp", "2", "--enable-dp-attention", "--threads", "1", "--dtype", "float32")
    sums = [(12, 30), (123, 456), (7, 8), (999, 1), (250, 250)]
    with serving("demo", *flags) as served:
        url = served.wait_url()
        assert len(served.ranks()) == 2

        def total(pair):
            talk = [{"role": "user", "content": f"What is {pair[0]} + {pair[1]}?"}]
            body = {"messages": talk, "temperature": 0, "max_tokens": 100}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            return answer["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(len(sums)) as pool:
            found = list(pool.map(total, sums))
        assert [f.rpartition(">")[2] for f in found] == [str(a + b) for a, b in sums]
        said = httpx.get(f"{url}/server_info").json()
        assert said["engine"]["enable_dp_attention"] and said["engine"]["tp"] == 2
        assert httpx.post(f"{url}/flush_cache").json()["pages_freed"] > 0


def test_replicas_are_of_a_server(tiny):
    with pytest.raises(ConfigError, match=r"--dp 2: a server runs replicas .* or give --enable-dp"):
        LLM(tiny, **SETTINGS, dp=2)
