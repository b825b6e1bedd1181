"""The demo's V3.2 sibling: what it holds, and what it keeps of the demo while it drops tokens."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ds_runtime import LLM, SamplingParams
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.checkpoint.tensors import SINGLE, read_header
from ds_runtime_bench.engine import accuracy
from parts import is_deep

FOLDER = resolve_model("demo-v32")
HELD = json.loads((resolve_model("demo") / "heldout.json").read_text())
KEYS = json.loads((resolve_model("demo") / "heldout_keys.json").read_text())["keys"]
SETTINGS = {"platform": "cpu", "threads": 1, "kv_memory": "120MB", "disable_radix_cache": True}


def test_it_holds_its_indexers_and_no_more():
    names = list(read_header(FOLDER / SINGLE))
    assert len(names) == 5 * 5 and all(".self_attn.indexer." in n for n in names)
    assert sum(f.stat().st_size for f in FOLDER.iterdir() if f.is_file()) <= 3 * 10**6


@pytest.fixture(scope="module")
def engines():
    with LLM("demo", **SETTINGS) as dense, LLM("demo-v32", **SETTINGS) as sparse:
        yield dense, sparse


@pytest.mark.slow
def test_perplexity_is_near_the_dense_demos_although_tokens_are_dropped(engines):
    """Of all passages, and of as many tokens as index_topk, where nothing is dropped."""
    dense, sparse = engines
    ids = [[0, *dense.tokenizer.encode(p["text"])] for p in HELD["prose"]]
    whole, dropped = (accuracy.perplexity(llm, ids)["perplexity"] for llm in (dense, sparse))
    assert 0 < abs(math.log(dropped / whole)) < math.log(1.01)
    top_k = json.loads((FOLDER / "config.json").read_text())["index_topk"]
    short = [part[:top_k] for part in ids[:6]]
    whole, dropped = (accuracy.perplexity(llm, short)["perplexity"] for llm in (dense, sparse))
    assert dropped == pytest.approx(whole, rel=2e-3)


def test_it_answers_as_the_dense_demo_behind_long_prose(engines):
    _, sparse = engines
    prose = [p["text"] for p in HELD["prose"]]
    asked = accuracy.behind(sparse, HELD["tools"][:4], prose, 1500)
    found, outputs = accuracy.score(sparse, FOLDER, "tools", asked)
    assert found["right"] == 4
    assert all(1400 < len(o.prompt_token_ids) < 1700 for o in outputs)
    (output,) = sparse.generate(["12+30="], SamplingParams(max_tokens=1))
    assert output.prompt_token_ids  # the base's tokenizer


def test_it_finds_planted_keys_although_most_tokens_are_dropped(engines):
    _, sparse = engines
    prose = [p["text"] for p in HELD["prose"]]
    asked = accuracy.with_keys(sparse, accuracy.spread(KEYS, 4), prose, 1500)
    found, outputs = accuracy.score(sparse, FOLDER, "keys", asked)
    assert found["right"] == 4
    assert all(1480 < len(o.prompt_token_ids) < 1520 for o in outputs)
    other = accuracy.with_keys(sparse, KEYS[1::50], prose, 1500)  # other facts, the same questions
    swapped = [{**o, "answer": a["answer"]} for a, o in zip(asked, other, strict=True)]
    assert accuracy.score(sparse, FOLDER, "keys", swapped)[0]["right"] == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["demo", "demo-v32"])
def test_keys_planted_in_4096_tokens_are_found(model):
    settings = {"model": model, "platform": "cpu", "threads": torch.get_num_threads()}
    report = accuracy.run(settings, 40 if is_deep() else 10, False, planted=(4096,))
    assert report["scores"]["planted"][4096]["share"] >= 0.95
