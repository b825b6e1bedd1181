"""Costs of sparse attention: what is timed of it, and what steps are predicted to take."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.measured.costs import Costs
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.ops.contracts.attention import index
from ds_runtime.ops.contracts.work import Sizes
from ds_runtime.ops.reference.inputs import TrueInputs
from ds_runtime.ops.reference.layouts import INDEX_PAGES, LATENT_PAGES
from ds_runtime.ops.table import OPS
from ds_runtime.predict import step as steps
from ds_runtime.predict.calls import PROMPTS, calls
from ds_runtime_bench.ops import tune
from ds_runtime_bench.shapes import config_of
from ds_runtime_kit.checks.conformance import facts_for

DEVICE = DeviceInfo("cpu", "", "")
TOP_K = 16  # of tiny-v32
GIVEN = {"platform": "cpu", "threads": 1, "load_format": "dummy", "kv_memory": 8_000_000}


def assembled(tmp_path, **values):
    config = config_of("tiny-v32", "bfloat16") | {"num_nextn_predict_layers": 0} | values
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {**GIVEN, "model": str(tmp_path)}
    return assemble(EngineConfig(**settings), set(settings))


@pytest.fixture(scope="module")
def costs():
    """As `tune costs` measures them here."""
    tuning = tune.Tuning(1e-4, (1, 4, 64), lambda said: None)
    config, geometry = EngineConfig(platform="cpu", threads=1), tune.Geometry("tiny-v32")
    made = tune.assembled(config, {"platform", "threads"}, geometry, "bfloat16")
    tuning.add(made, (), (48, 96))
    return tuning.costs()


@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 50))
def test_what_rows_see_is_added_up(rows, context, most):
    """Of sequences of a row each, and of the last rows of a prompt."""
    facts = Facts(DEVICE, Dims({}))
    limit = 10**9 if most is None else most
    own = Sizes(facts=facts, context=context)
    assert own.seen(rows, most) == rows * min(context, limit)
    prompt = replace(own, prompt=True)
    assert prompt.seen(rows, most) == sum(min(context + i + 1, limit) for i in range(rows))


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(("context", "tokens"), [(40, 3), (8, 11), (21, 1), (5, 4)])
def test_inputs_have_the_rows_that_are_counted(context, tokens, prompt):
    """Slots that a row attends are of its sequence, distinct, and no more than it sees."""
    given = facts_for(DEVICE, "float32")
    dims = {**given.dims, "index_topk": TOP_K, "index_heads": 4, "index_dim": 32}
    facts = replace(given, dims=Dims(dims))
    said = {"facts": facts, "device": torch.device("cpu"), "context": context, "prompt": prompt}
    place = TrueInputs(layout=LATENT_PAGES, **said)
    inputs, _ = OPS["sparse_decode"].cost.calls[""]
    q, _, slots, *_ = inputs(place, tokens)
    assert q.shape[0] == slots.shape[0] == tokens
    assert int((slots >= 0).sum()) == place.seen(tokens, TOP_K)
    for row in slots:
        own = row[row >= 0]
        assert len(own.unique()) == len(own)
    scored, _ = OPS["index_scores"].cost.calls[""]
    *_, table, owners, lens = scored(TrueInputs(layout=INDEX_PAGES, **said), tokens)
    assert int(lens.sum()) == place.seen(tokens)
    assert len(table) == (1 if prompt else tokens) and int(owners.max()) == len(table) - 1
    assert int(lens.max()) <= table.shape[1] * facts.page_size


SPARSE = {"index_prologue", "index_scores", "index_topk", "sparse_decode", "sparse_prefill"}


def test_every_kernel_of_sparse_attention_is_timed_and_predicted(tmp_path, costs):
    made = assembled(tmp_path)
    for step in (steps.decode(4, 64), steps.prefill(64, 64), steps.prefill(64, 8)):
        asked = {call.op for call in calls(made, step)}
        assert asked & SPARSE
        found = steps.predict(made, costs, step)
        assert not found.unmeasured, step
    said = steps.notes(made, costs, [found])
    assert not [line for line in said if line.startswith("not measured")]


def test_a_file_without_prompts_says_so(tmp_path, costs):
    """As those of before are: decode steps are as they were, and prompts are named."""
    older = {n: k for n, k in costs.kernels.items() if not n.endswith(f":{PROMPTS}")}
    path = tmp_path / "costs.json"
    replace(costs, kernels=older).write(path)
    made, read = assembled(tmp_path), Costs.read(path)
    decode = steps.decode(4, 64)
    assert not steps.predict(made, read, decode).unmeasured
    found = steps.predict(made, read, steps.prefill(64, 64))
    names = {call.kernel.name for call in calls(made, steps.prefill(64, 64)) if call.prompts}
    assert found.unmeasured == {f"{name} (prompts)" for name in names} and len(names) == 3
    (said,) = [said for said in steps.notes(made, read, [found]) if said.startswith("not measured")]
    assert all(f"{name} (prompts)" in said for name in names)


@pytest.mark.parametrize(("prompt", "context", "sparse"), [(8, 0, 0), (17, 0, 1), (8, 9, 1)])
def test_prompts_choose_where_they_see_more_than_they_attend(tmp_path, prompt, context, sparse):
    made = assembled(tmp_path)
    found = [call.op for call in calls(made, steps.prefill(3 * prompt, prompt, context))]
    layers = made.model.layers
    assert found.count("sparse_prefill") == found.count("index_scores") == sparse * layers
    assert found.count("mha_prefill") == (not sparse) * layers


def test_long_prompts_are_scored_in_parts(tmp_path, monkeypatch):
    """As the model does: so many rows at once that their scores have room."""
    made, step = assembled(tmp_path), steps.prefill(64, 64)
    whole = [c for c in calls(made, step) if c.op == "index_scores"]
    assert all(call.rows == 64 and call.count == 1 for call in whole)
    monkeypatch.setattr(index, "SCORES", 20 * 64)
    parts = [c for c in calls(made, step) if c.op == "index_scores"]
    for one, part in zip(whole, parts, strict=True):
        assert (part.rows, part.count) == (16, 4)
        assert part.count * part.work(16).flops == pytest.approx(one.work(64).flops)
