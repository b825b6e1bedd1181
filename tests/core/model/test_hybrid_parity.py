"""DeepSeek-V4 through the real engine against transformers: every log-probability to 1e-4."""

from __future__ import annotations

import random

import pytest
import torch
from hybrid_models import (
    BASE,
    FP8_SCALE,
    SCORED,
    SETTINGS,
    HybridOracle,
    compare,
    drawn,
    fp8,
    write_native,
)

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.description.sites import model_sites
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.offline.llm import LLM
from ds_runtime.sampling_params import SamplingParams
from ds_runtime.weights.load import quant_of


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


@pytest.mark.parametrize("base", [False, True], ids=["fp4 experts", "base"])
def test_native_checkpoints(tmp_path, base):
    """Those of DeepSeek: two e2m1 in a byte, FP8 in blocks, exponents for scales; and of base
    models, whose experts are FP8."""
    values = {**BASE, "hidden_size": 160, "q_lora_rank": 144, "moe_intermediate_size": 64}
    oracle = HybridOracle(values, seed=2)
    oracle.round()
    if base:
        for name, p in oracle.model.named_parameters():
            if ".mlp.experts." in name:
                p.data = fp8(p.data).to(p.dtype) * FP8_SCALE
    write_native(oracle, tmp_path, base)
    config = EngineConfig(model=str(tmp_path), **SETTINGS)
    prompts = [oracle.prompt(n, n) for n in (3, 150)]
    with LLM(tmp_path, **SETTINGS) as llm:
        compare(oracle, prompts, llm.generate(prompts, SCORED))
    sites = model_sites(load_config(tmp_path), quant_of(assemble(config)).format_of)
    formats = {site.op: set() for site in sites}
    for site in sites:
        formats[site.op].add(site.weight_format)
    assert formats["experts_limited"] == {"fp8_block" if base else "mxfp4"}
    assert formats["grouped_linear"] == {"fp8_block"}
    assert formats["linear"] == {"fp8_block", "dense"}  # compressors and the head


def fp8_groups(x, plain):
    """As e4m3 times a power of two per 64 of the first dims: said in other words than the op's."""
    made = x.clone()
    for first in range(0, plain, 64):
        part = x[..., first : min(first + 64, plain)]
        power = torch.ceil(torch.log2(part.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448))
        rounded = (part / 2.0**power).to(torch.float8_e4m3fn).to(x.dtype) * 2.0**power
        made[..., first : min(first + 64, plain)] = rounded
    return made


def fp4(x):
    """Behind the Hadamard matrix, as e2m1 times a power of two per 32."""
    d = x.shape[-1]
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < d:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    blocks = (x @ matrix * d**-0.5).unflatten(-1, (-1, 32))
    power = torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=6e-38) / 6))
    numbers = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=x.dtype)
    size = (blocks / 2.0**power).abs()
    near = numbers[(size.unsqueeze(-1) - numbers).abs().argmin(-1)]
    return (near * blocks.sign() * 2.0**power).flatten(-2)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_as_in_training(tmp_path, seed):
    """Against transformers with what DeepSeek's own code rounds rounded: latents and entries in
    FP8, index queries and keys in FP4. A number between two codes may go to either, and what
    follows it moves a little: not so in most prompts. Without the flag all are told apart."""
    values = {**BASE, "index_head_dim": 32, "head_dim": 96, "compress_ratios": [0, 4, 128, 4]}
    oracle = HybridOracle({**values, "num_hidden_layers": 4, "index_topk": 4}, seed)
    oracle.model.save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    for model in (oracle.model, oracle.double):
        for name, module in model.named_modules():
            if name.endswith("kv_norm") and ".indexer." not in name:
                module.register_forward_hook(lambda m, a, out: fp8_groups(out, 88))
            if name.endswith("scorer"):
                module.register_forward_pre_hook(lambda m, a: (fp4(a[0]), fp4(a[1]), a[2]))
    draw, prompts = random.Random(seed), []
    while len(prompts) < 5:  # where no rounding hangs on the last bits
        tokens = [draw.randrange(131) for _ in range(draw.choice([30, 60, 135]))]
        double = oracle.double(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        if (double - oracle.logprobs(tokens)).abs().max() < 2e-5:
            prompts.append(tokens)

    def errors(**more):
        with LLM(tmp_path, **SETTINGS, **more) as llm:
            found = llm.generate(prompts, params)
        worst = []
        for tokens, output in zip(prompts, found, strict=True):
            want = oracle.logprobs(tokens)
            got = [x.logprob for x in output.prompt_logprobs[1:]]
            worst.append(max(abs(g - float(want[i, tokens[i + 1]])) for i, g in enumerate(got)))
        return sorted(worst)

    rounded, exact = errors(trained_rounding=True, chunked_prefill_size=50), errors()
    assert rounded[len(rounded) // 2] < 2e-5
    # The oracle itself goes as far as 0.6 where weights differ by 1e-6 of themselves.
    assert rounded[-1] < exact[0] / 20


def test_rounding_that_no_training_had_is_refused(tmp_path):
    HybridOracle({**BASE, "index_head_dim": 16}).model.save_pretrained(tmp_path)
    given = {**SETTINGS, "trained_rounding": True}
    with pytest.raises(UnsupportedError, match="index_head_dim 16 is no multiple of 32"):
        LLM(tmp_path, **given)
    with pytest.raises(ConfigError, match="index-cache-dtype fp8: --trained-rounding has"):
        LLM(tmp_path, **given, index_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM was trained otherwise"):
        LLM("demo", platform="cpu", trained_rounding=True)


def test_latents_in_fp8(six):
    """Without scales, as of other models: near what float32 gives."""
    folder, oracle = six
    prompt = oracle.prompt(140, 4)
    with LLM(folder, **SETTINGS, kv_cache_dtype="fp8") as llm:
        (output,) = llm.generate([prompt], SCORED)
    want = oracle.logprobs(prompt)
    got = [x.logprob for x in output.prompt_logprobs[1:]]
    errors = [abs(g - float(want[i, prompt[i + 1]])) for i, g in enumerate(got)]
    assert 1e-4 < sum(errors) / len(errors) < 0.2
