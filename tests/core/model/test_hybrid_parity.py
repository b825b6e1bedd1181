"""DeepSeek-V4 through the real engine against transformers: every log-probability to 1e-4."""

from __future__ import annotations

import random

import pytest
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
from ds_runtime.offline.llm import LLM
from ds_runtime.weights.load import quant_of


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """(folder, oracle) of six layers of all kinds."""
    folder, oracle = tmp_path_factory.mktemp("six"), HybridOracle(BASE, seed=1)
    oracle.model.save_pretrained(folder)
    return str(folder), oracle


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
