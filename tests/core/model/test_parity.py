"""Log-probabilities of every position against transformers, in random mixed schedules."""

from __future__ import annotations

import copy

import pytest
import torch
from model_harness import Harness, decide, on_ranks, run_schedule

from ds_runtime_kit.models.oracle import Oracle, compare
from ds_runtime_kit.models.tiny import SHAPES
from tiny_models import prompts_of


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_prompts(checkpoints, shape, kernels):
    folder, oracle = checkpoints(shape)
    harness = Harness(decide(folder, kernels))
    prompts = prompts_of(oracle)
    sequences = harness.sequences(prompts, seed=1)
    for sequence in sequences:
        harness.step([(sequence, len(sequence.tokens))])
    compare(oracle, prompts, [s.logits[0] for s in sequences], 1e-4)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_random_schedules(checkpoints, shape, kernels):
    """Chunks of all sizes, decodes among prefills, shuffled pages, prefixes in pieces."""
    folder, oracle = checkpoints(shape)
    for seed, (page_size, largest) in enumerate(((16, 40), (1, 7), (64, 200))):
        harness = Harness(decide(folder, kernels, page_size=page_size), pages=1024 // page_size)
        prompts = prompts_of(oracle, seed=seed)
        compare(oracle, prompts, run_schedule(harness, prompts, seed, largest), 1e-4)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_token_by_token(checkpoints, kernels):
    """Every token but the first through the absorbed path, over many page edges."""
    folder, oracle = checkpoints("v3")
    harness = Harness(decide(folder, kernels, page_size=8))
    prompts = prompts_of(oracle, (90, 17, 8))
    sequences = harness.sequences(prompts, seed=2)
    while waiting := [s for s in sequences if s.done < len(s.tokens)]:
        harness.step([(s, 1) for s in waiting])
    compare(oracle, prompts, [torch.cat(s.logits) for s in sequences], 1e-4)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("shape", ["v2-lite", "v3"])
def test_fp8_weights(checkpoints, shape, kernels):
    """FP8 blocks mean weight · scale: in float32 as exact as any other weights."""
    folder, oracle = checkpoints(shape, fp8=True)
    assembly = decide(folder, kernels)
    assert any(site.weight_format == "fp8_block" for site, _ in assembly.binding.choices)
    prompts = prompts_of(oracle)
    compare(oracle, prompts, run_schedule(Harness(assembly), prompts, 5, 50), 1e-4)


@pytest.mark.parametrize(
    ("shape", "ranks", "fp8"), [("v2-lite", 2, False), ("v3", 4, True), ("v2", 2, True)]
)
def test_tensor_parallel(checkpoints, shape, ranks, fp8):
    """Ranks that hold shards only, an odd vocabulary among them, agree with transformers."""
    folder, oracle = checkpoints(shape, fp8=fp8)
    prompts = prompts_of(oracle, (70, 5, 31))

    def rank(world):
        return run_schedule(Harness(decide(folder, "cpu", tp=ranks), world), prompts, 4, 30)

    results = on_ranks(ranks, rank)
    compare(oracle, prompts, results[0], 1e-4)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_bfloat16_is_as_near_as_transformers(checkpoints):
    """Random routers flip in 16 bits: the mean error may be 1.3 × that of transformers there."""
    for shape in ("v2-lite", "v3"):
        folder, oracle = checkpoints(shape)
        prompts = prompts_of(oracle)
        coarse = Oracle(copy.deepcopy(oracle.model).bfloat16())
        logits = run_schedule(Harness(decide(folder, "cpu", dtype="bfloat16")), prompts, 6, 50)
        ours, theirs = [], []
        for tokens, found in zip(prompts, logits, strict=True):
            exact = oracle.logprobs(tokens)
            ours.append((found.log_softmax(-1) - exact).abs())
            theirs.append((coarse.logprobs(tokens).float() - exact).abs())
        assert torch.cat(ours).mean() < 1.3 * torch.cat(theirs).mean() < 0.2
