"""--disable-mla: a cache of expanded keys and values gives what latents give, and says its cost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_harness import Harness, decide, on_ranks, run_schedule

from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.errors import ConfigError
from ds_runtime_kit.models.adapters import write_adapter
from ds_runtime_kit.models.oracle import compare
from tiny_models import prompts_of

FIXTURES = Path(__file__).parent / "fixtures"
KERNELS = {"cpu": (), "reference": ("mha_decode=reference", "mha_prefill=reference")}


def expanded(folder, pin=(), **settings):
    return decide(folder, "cpu", disable_mla=True, pin=pin, **settings)


def binds(assembly):
    return {(d.op, d.kernel) for d in assembly.binding.decisions}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", ["v2-lite", "v2", "v3"])
def test_random_schedules_against_transformers(checkpoints, shape, kernels):
    """Chunks of all sizes, decodes among prefills, shuffled pages, prefixes in pieces."""
    folder, oracle = checkpoints(shape)
    for seed, (page_size, largest) in enumerate(((16, 40), (1, 7), (64, 200))):
        assembly = expanded(folder, KERNELS[kernels], page_size=page_size)
        ops = {op for op, _ in binds(assembly)}
        assert "mha_decode" in ops and not ops & {"mla_decode", "mla_prologue", "mla_inputs"}
        harness = Harness(assembly, pages=1024 // page_size)
        prompts = prompts_of(oracle, seed=seed)
        compare(oracle, prompts, run_schedule(harness, prompts, seed, largest), 1e-4)


def test_token_by_token_is_what_latents_give(checkpoints):
    folder, oracle = checkpoints("v3")
    prompts = prompts_of(oracle, (90, 17, 8))
    found = []
    for assembly in (decide(folder, "cpu", page_size=8), expanded(folder, page_size=8)):
        harness = Harness(assembly)
        sequences = harness.sequences(prompts, seed=2)
        while waiting := [s for s in sequences if s.done < len(s.tokens)]:
            harness.step([(s, 1) for s in waiting])
        found.append([torch.cat(s.logits) for s in sequences])
    for latent, plain in zip(*found, strict=True):
        assert torch.allclose(latent, plain, atol=1e-4)
        assert torch.equal(latent.argmax(-1), plain.argmax(-1))


def test_fp8_weights(checkpoints):
    folder, oracle = checkpoints("v3", fp8=True)
    prompts = prompts_of(oracle)
    compare(oracle, prompts, run_schedule(Harness(expanded(folder)), prompts, 5, 50), 1e-4)


def test_ranks_hold_their_heads_alone(checkpoints):
    folder, oracle = checkpoints("v3", fp8=True)
    prompts = prompts_of(oracle, (70, 5, 31))

    def rank(world):
        return run_schedule(Harness(expanded(folder, tp=2), world), prompts, 4, 30)

    first, second = on_ranks(2, rank)
    compare(oracle, prompts, first, 1e-4)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    one, two = (expanded(folder, tp=n) for n in (1, 2))
    dims, layers, size = one.facts.dims, one.model.layers, one.config.page_size
    each = dims["heads"] * (dims["qk_nope"] + dims["v"]) + dims["qk_rope"]
    assert one.cache_sizes.page == size * layers * each * 4
    assert (
        two.cache_sizes.page
        == size * layers * ((each - dims["qk_rope"]) // 2 + dims["qk_rope"]) * 4
    )


def test_a_cache_in_fp8_is_near(checkpoints):
    folder, oracle = checkpoints("v3")
    prompts = prompts_of(oracle, (40, 9))
    found = [
        run_schedule(Harness(make(folder, kv_cache_dtype="fp8")), prompts, 1, 9)
        for make in (lambda *a, **k: decide(*a, "cpu", **k), expanded)
    ]
    exact = [oracle.logprobs(p) for p in prompts]
    for latent, plain, right in zip(*found, exact, strict=True):
        errors = [(x.log_softmax(-1) - right).abs().mean() for x in (latent, plain)]
        assert errors[1] < 3 * errors[0] < 1


def test_adapters_change_what_is_cached(checkpoints, tmp_path):
    """kv_b's adapter is in the keys and values that a request's tokens left."""
    folder, oracle = checkpoints("v3")
    adapter, config = tmp_path / "a", load_config(folder)
    write_adapter(adapter, config, lambda module: module.endswith("kv_b_proj"), seed=1)
    prompts = prompts_of(oracle, (40, 21, 30))
    found = []
    for make in (lambda *a, **k: decide(*a, "cpu", **k), expanded):
        harness = Harness(make(folder, lora=(f"a={adapter}",)))
        found.append(run_schedule(harness, prompts, 3, 12, adapters=(0, -1, 0)))
    for latent, plain in zip(*found, strict=True):
        assert torch.allclose(latent, plain, atol=1e-4)
    compare(oracle, prompts[1:2], found[1][1:2], 1e-4)


def config_of(name, tmp_path):
    shutil.copy(FIXTURES / f"deepseek-{name}.json", tmp_path / "config.json")
    return str(tmp_path)


def test_the_plan_says_what_it_costs(capsys, tmp_path):
    """128 heads of 128 + 128 values and a key of 64, where latents take 512 + 64."""
    model = config_of("v3", tmp_path)
    args = ["plan", "--model", model, "--device", "h200", "--tp", "8", "--disable-mla"]
    args += ["--context-length", "32768"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "expanded_pages.v1" in out and "mha_decode" in out
    line = next(x for x in out.splitlines() if x.startswith("--disable-mla: "))
    assert line == (
        "--disable-mla: keys and values of all heads take 507.5 kB a token, "
        "7.2 times the 70.3 kB of latents"
    )
    assert main([*args, "--json"]) == 0
    assert line in json.loads(capsys.readouterr().out)["memory"]


@pytest.mark.parametrize("device", ["h200", "a100", "b200", "mi300x", "b60"])
def test_gpus_attend_it_in_captured_steps(device, tmp_path):
    config = EngineConfig(model=config_of("v2-lite", tmp_path), disable_mla=True)
    assembly = assemble(config, ("disable_mla",), device=device)
    assert ("mha_decode", "triton.mha_decode") in binds(assembly)
    assert assembly.facts.graph_capture and assembly.binding.layout.tag == "expanded_pages.v1"
    assert assembly.plan.heavy_references() == []


def test_chosen_tokens_have_latents(tmp_path):
    model = config_of("v3.2", tmp_path)
    with pytest.raises(ConfigError, match=r"--disable-mla: Deepseek.* leave the flag out"):
        assemble(EngineConfig(model=model, disable_mla=True), ("disable_mla",), device="h200")
