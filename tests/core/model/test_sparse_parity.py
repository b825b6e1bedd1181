"""Sparse attention against transformers: what is chosen, and every log-probability."""

from __future__ import annotations

import pytest
import torch
from model_harness import Harness, decide, on_ranks, run_schedule

from ds_runtime.engine.banner import warnings
from ds_runtime.errors import ConfigError
from ds_runtime.model import indexer
from ds_runtime.ops.contract import FP8_GROUPS, DeviceInfo, Dims, Facts, load_attr
from ds_runtime.ops.contracts.attention import index
from ds_runtime.ops.reference.layouts import INDEX_PAGES, LATENT_FP8_GROUPS
from ds_runtime_kit.models.oracle import compare
from ds_runtime_kit.models.tiny import SPARSE
from tiny_models import made_once, prompts_of

LENGTHS = (150, 64, 25, 24, 1)  # of 24 tokens at most are attended
# In FP8 wq_b has several blocks of scales, whole and partial ones, in both directions.
BLOCKS = {False: {}, True: {"hidden_size": 160, "q_lora_rank": 144, "index_n_heads": 18}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    make = made_once(tmp_path_factory, seed=3)
    return lambda shape, top_k=24, fp8=False: make(shape, fp8, index_topk=top_k, **BLOCKS[fp8])


@pytest.fixture
def chosen(monkeypatch):
    """Every choice of every layer, as tokens per row."""
    found, best = [], indexer.Indexer._best

    def seen(self, q, weights, cache, part):
        slots = best(self, q, weights, cache, part)
        size = self.page_size
        for row, owner, length in zip(slots, part.owners, part.lens, strict=True):
            pages = {int(p): i for i, p in enumerate(part.page_table[owner][: -(-length // size)])}
            real = row[row >= 0].tolist()
            found.append({pages[s // size] * size + s % size for s in real})
        return slots

    monkeypatch.setattr(indexer.Indexer, "_best", seen)
    return found


def expected_sets(model, tokens):
    """What transformers' indexers choose: per layer with one, a set per position."""
    made, hooks = [], []
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            hooks.append(module.register_forward_hook(lambda m, a, out: made.append(out[0])))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [[{i for i in row.tolist() if i <= t} for t, row in enumerate(layer)] for layer in made]


@pytest.mark.parametrize("shape", SPARSE)
def test_the_same_tokens_are_chosen(checkpoints, shape, chosen):
    folder, oracle = checkpoints(shape)
    (tokens,) = prompts_of(oracle, (150,))
    harness = Harness(decide(folder))
    (sequence,) = harness.sequences([tokens], seed=1)
    harness.step([(sequence, len(tokens))])
    expected = expected_sets(oracle.double, tokens)
    assert len(expected) == (3 if shape == "v32" else sum(harness.assembly.model.indexing.computes))
    assert chosen == [row for layer in expected for row in layer]


@pytest.mark.parametrize(("shape", "kernels"), [("v32", "reference"), ("glm", "cpu")])
def test_random_schedules(checkpoints, shape, kernels):
    """Whole, chunked, cached, mixed, decode, and pages of several sizes."""
    folder, oracle = checkpoints(shape)
    for seed, (page_size, largest) in enumerate(((16, 40), (1, 7), (64, 200))):
        harness = Harness(decide(folder, kernels, page_size=page_size), pages=1024 // page_size)
        prompts = prompts_of(oracle, LENGTHS, seed)
        compare(oracle, prompts, run_schedule(harness, prompts, seed, largest), 1e-4)


def test_scores_in_groups(checkpoints, monkeypatch):
    """As prompts are scored whose scores would not fit: a few rows at a time."""
    monkeypatch.setattr(index, "SCORES", 700)
    folder, oracle = checkpoints("v32")
    prompts = prompts_of(oracle, LENGTHS)
    compare(oracle, prompts, run_schedule(Harness(decide(folder)), prompts, 2, 100), 1e-4)


def test_token_by_token(checkpoints):
    folder, oracle = checkpoints("glm")
    prompts = prompts_of(oracle, (90, 26))
    harness = Harness(decide(folder, page_size=8))
    sequences = harness.sequences(prompts, seed=2)
    while waiting := [s for s in sequences if s.done < len(s.tokens)]:
        harness.step([(s, 1) for s in waiting])
    compare(oracle, prompts, [torch.cat(s.logits) for s in sequences], 1e-4)


@pytest.mark.parametrize("shape", SPARSE)
def test_all_tokens_chosen_is_dense_attention(checkpoints, shape, monkeypatch):
    """top_k ≥ length: the same whether chosen by score, taken whole, or attended densely."""
    folder, oracle = checkpoints(shape, top_k=200)
    prompts = prompts_of(oracle, LENGTHS)
    dense = run_schedule(Harness(decide(folder)), prompts, 3, 60)
    compare(oracle, prompts, dense, 1e-4)
    monkeypatch.setattr(indexer, "longest", lambda part: 1 << 30)
    sparse = run_schedule(Harness(decide(folder)), prompts, 3, 60)
    compare(oracle, prompts, sparse, 1e-4)


def test_ranks_choose_alike(checkpoints):
    folder, oracle = checkpoints("v32")
    prompts = prompts_of(oracle, (70, 5, 31))

    def rank(world):
        return run_schedule(Harness(decide(folder, "cpu", tp=2), world), prompts, 4, 30)

    results = on_ranks(2, rank)
    compare(oracle, prompts, results[0], 1e-4)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_layers_that_share_have_neither_weights_nor_cache(checkpoints):
    folder, _ = checkpoints("glm")
    harness = Harness(decide(folder))
    computes = harness.assembly.model.indexing.computes
    assert computes == (True, True, False, True, False)
    indexers = [block.attention.indexer for block in harness.model.blocks]
    assert tuple(i is not None for i in indexers) == computes
    assert len(list(harness.caches)) == 5 + 3
    places = {s.layer for s, _ in harness.assembly.binding.choices if s.op == "index_scores"}
    assert places == {0, 1, 3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_index_keys_choose_nearly_alike(checkpoints, dtype, chosen):
    """132 bytes a token at the true width; of the tokens chosen exactly, most are still."""
    folder, oracle = checkpoints("v32")
    (tokens,) = prompts_of(oracle, (150,))
    harness = Harness(decide(folder, dtype=dtype, index_cache_dtype="fp8"))
    assert all(c.shape[-1] == 32 + 4 and c.dtype == torch.uint8 for c in list(harness.caches)[3:])
    (sequence,) = harness.sequences([tokens], seed=1)
    harness.step([(sequence, 100)])
    while sequence.done < len(tokens):
        harness.step([(sequence, 1)])
    first_layer = expected_sets(oracle.double, tokens)[0]
    ours = chosen[:100] + chosen[300::3]
    kept = [len(a & b) / len(b) for a, b in zip(ours, first_layer, strict=True)]
    assert min(kept) > 0.7 and sum(kept) / len(kept) > 0.95


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SPARSE)
def test_fp8_weights(checkpoints, shape, kernels, chosen):
    """Native FP8 blocks, the indexer's among them: the same choice and log-probabilities as
    transformers' with the values that they mean."""
    folder, oracle = checkpoints(shape, fp8=True)
    assembly = decide(folder, kernels)
    packed = {s.module: s.weight_format for s, _ in assembly.binding.choices if s.weight_format}
    assert packed["self_attn.indexer.wq_b"] == packed["self_attn.qkv_a_proj"] == "fp8_block"
    harness = Harness(assembly)
    (tokens,) = prompts_of(oracle, (150,))
    (sequence,) = harness.sequences([tokens], seed=1)
    harness.step([(sequence, len(tokens))])
    assert chosen == [row for layer in expected_sets(oracle.double, tokens) for row in layer]
    prompts = prompts_of(oracle, LENGTHS, 5)
    compare(oracle, prompts, run_schedule(Harness(assembly), prompts, 5, 50), 1e-4)


@pytest.mark.parametrize("keys", ["bfloat16", "fp8"])
def test_fp8_weights_and_rounded_index_keys(checkpoints, keys, chosen, monkeypatch):
    """Rounded keys may choose other tokens, and change nothing else: where all are chosen, by their
    scores, log-probabilities are those of transformers."""
    folder, oracle = checkpoints("v32", fp8=True)
    (tokens,) = prompts_of(oracle, (150,))
    harness = Harness(decide(folder, index_cache_dtype=keys))
    (sequence,) = harness.sequences([tokens], seed=1)
    harness.step([(sequence, len(tokens))])
    first_layer = expected_sets(oracle.double, tokens)[0]
    kept = [len(a & b) / len(b) for a, b in zip(chosen, first_layer, strict=False)]
    assert min(kept) > 0.7 and sum(kept) / len(kept) > 0.95
    folder, oracle = checkpoints("v32", top_k=200, fp8=True)
    monkeypatch.setattr(indexer, "longest", lambda part: 1 << 30)
    prompts = prompts_of(oracle, LENGTHS)
    compare(
        oracle,
        prompts,
        run_schedule(Harness(decide(folder, index_cache_dtype=keys)), prompts, 3, 60),
        1e-4,
    )


def test_scaled_fp8_latents(checkpoints):
    """The 656-byte form. Random routers flip in 8 bits; each op is held to its float64 oracle."""
    folder, oracle = checkpoints("v32", top_k=200)  # every token is chosen: only rounding departs
    prompts = prompts_of(oracle, (90, 40))
    harness = Harness(decide(folder, kv_cache_dtype="fp8"))
    assert harness.assembly.binding.layout.tag == "latent_fp8_groups.v1"
    assert all(
        c.dtype == torch.uint8 and c.shape[-1] == 32 + 4 + 32 for c in list(harness.caches)[:3]
    )
    logits = run_schedule(harness, prompts, 3, 30)
    for tokens, found in zip(prompts, logits, strict=True):
        error = (found.log_softmax(-1) - oracle.logprobs(tokens)).abs()
        assert 1e-4 < error.mean() < 0.2


def test_bytes_of_a_token_at_the_published_widths():
    dims = Dims({"kv_lora": 512, "qk_rope": 64, "index_dim": 128})
    device = DeviceInfo("cpu", "any", "any")
    facts = Facts(device, dims, "bfloat16", FP8_GROUPS, 64, index_dtype="float8_e4m3fn")
    assert LATENT_FP8_GROUPS.bytes_per_token(facts) == 656
    assert INDEX_PAGES.bytes_per_token(facts) == 132
    for layout, width in ((LATENT_FP8_GROUPS, 656), (INDEX_PAGES, 132)):
        assert load_attr(layout.allocate)(3, facts, "cpu").shape == (3, 64, width)


def test_backends_are_pins(checkpoints):
    folder, _ = checkpoints("v32")
    flags = {f"nsa_{name}_backend": "reference" for name in ("prefill", "decode", "topk")}
    assembly = decide(folder, "cpu", **flags)
    assert warnings(assembly) == [  # and no reason, as it is as wished
        f"warning: sparse_{of} at layers.0-2.self_attn ({of}) runs on the slow reference"
        for of in ("prefill", "decode")
    ]
    chosen = assembly.binding.choices
    ops = ("sparse_prefill", "sparse_decode", "index_topk")
    assert {k.provider for s, k in chosen if s.op in ops and k is not None} == {"reference"}
    with pytest.raises(ConfigError, match="--nsa-topk-backend 'referense': no such provider of"):
        decide(folder, "cpu", nsa_topk_backend="referense")
