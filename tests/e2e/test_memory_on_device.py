"""On the accelerator that is here: no step runs out of memory, and dummy weights are of use."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import pytest
import torch

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly import room
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_bench.shapes import config_of

pytestmark = pytest.mark.gpu
VOCAB = 102400


@pytest.fixture(scope="module")
def platform() -> Platform:
    best, _ = select_platform(load_plugins())
    if not best.own_memory:
        pytest.skip(f"the best platform here is {best.name}, which shares its memory")
    return best


def configured(folder, shape, dtype="bfloat16", **changes):
    (folder / "config.json").write_text(json.dumps({**config_of(shape, dtype), **changes}))
    return str(folder)


def prompts(count, length, seed, vocab=VOCAB):
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(count)]


def test_the_widest_steps_fit_where_only_the_reserve_is_left(
    tmp_path, platform: Platform, monkeypatch
):
    """Nine tenths of a large device leave more than steps need: here the whole device is given away
    but for what the rule reserves. Then come steps of --max-step-tokens, also over expanded
    prefixes, and 512 requests that use all that sampling can hold."""
    monkeypatch.setattr(room, "STATIC", 1.0)
    folder = configured(tmp_path, "lite-8")
    with LLM(folder, load_format="dummy") as llm:
        assert llm._engine is not None
        config = llm._engine.assembly.config
        assert config.max_running_requests == 512
        most = config.max_step_tokens
        left = platform.memory().free
        kept = room.reserve(llm._engine.assembly)
        assert left < kept.total  # captured steps took their part already
        short = SamplingParams(max_tokens=2, ignore_eos=True)
        llm.generate(prompts(2 * most // 1000, 1000, 1), short)
        llm.generate(prompts(3, 3 * most, 2), short)
        wide = SamplingParams(
            max_tokens=16, ignore_eos=True, temperature=0.9, top_p=0.9, top_k=50, logprobs=20,
            frequency_penalty=0.5, min_p=0.01,
        )  # fmt: skip
        answers = llm.generate(prompts(600, 40, 3), wide)
        assert len(answers) == 600
        llm.generate(prompts(4, 2000, 4), SamplingParams(max_tokens=1, prompt_logprobs=5))
        torch.cuda.synchronize()
        print(f"free {left / 1e9:.2f} GB after the start, {kept.total / 1e9:.2f} GB are reserved")
        assert platform.memory().free > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_sixty_four_dummy_layers_over_65536_tokens(tmp_path, platform: Platform, dtype):
    """Nothing is NaN or infinite, and the next token has 2 to 6 nats."""
    sizes = {"num_hidden_layers": 64, "hidden_size": 2048, "num_attention_heads": 16}
    sizes |= {"n_routed_experts": 32, "moe_intermediate_size": 512, "vocab_size": 129280}
    sizes |= {"max_position_embeddings": 65600, "intermediate_size": 4096}
    sizes |= {"num_key_value_heads": 16, "num_nextn_predict_layers": 0}
    folder = configured(tmp_path, "v3-slice", dtype, **sizes)
    with LLM(folder, load_format="dummy", disable_radix_cache=True) as llm:
        asked = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=20)
        (whole,) = llm.generate(prompts(1, 65536, 5, 129280), asked)
        assert whole.outputs[0].logprobs is not None
        first = whole.outputs[0].logprobs[0]
        assert all(math.isfinite(value) for value in (first.logprob, *dict(first.top).values()))
        drawing = SamplingParams(max_tokens=2, logprobs=1, ignore_eos=True, temperature=1.0)
        many = llm.generate(prompts(512, 128, 6, 129280), drawing)
        drawn = [token.logprob for each in many for token in each.outputs[0].logprobs or ()]
        assert len(drawn) == 2 * 512
        nats = -sum(drawn) / len(drawn)  # of what is drawn by its probability: the entropy
        assert 2 < nats < 6, nats
        assert len(Counter(each.outputs[0].token_ids[0] for each in many)) > 256
        print(f"{nats:.2f} nats")
