"""Captured cycles beside what else may be on: answers are those of plain steps, token for token.

On the platform that records torch ops: a replay there works on the tensors of the capture, as on a
device. It is asynchronous, so steps are launched ahead; prompts come in chunks, and again from the
prefix cache.
"""

from __future__ import annotations

import pytest
from test_graphs import set_up
from test_speculation import SETTINGS, asked, shortened
from test_speculation_pairs import adapter, answers, made, once  # noqa: F401

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.messages import Submit
from ds_runtime.parallel.world import World

CHAIN = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
TREE = {**CHAIN, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
ADAPTIVE = {**TREE, "speculative_adaptive": True}
DRAFTING = pytest.mark.parametrize("drafting", [CHAIN, TREE], ids=("chain", "tree"))
WHOLE = {"prefill_graph_sizes": (SETTINGS["max_step_tokens"],)}  # that every prompt takes
RULES = (
    OutputRules(json_schema='{"type": "object", "properties": {"sum": {"type": "integer"}}}'),
    OutputRules(regex="(a|bc|[d-k]x){20,30}"),
)
pytestmark = pytest.mark.usefixtures("one_thread")


def everything(**settings):
    """Every kind of request, then some again; and the engine's statistics."""
    with LLM("demo", **{**SETTINGS, **settings}) as llm:
        prompts, params = asked(llm)
        params = [shortened(p, 10) for p in params]
        for i, rules in enumerate(RULES):
            prompts.append(llm.tokenizer.encode("What is 12 + 30?") * (1 + i))
            params.append(SamplingParams(max_tokens=12, temperature=float(i), seed=i, rules=rules))
        outputs = llm.generate(prompts, params) + llm.generate(prompts[:3], params[:3])
        found = [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in outputs]
        return found, llm.stats()


@pytest.fixture(scope="module")
def plain():
    return everything(disable_graph=True)[0]


def eager_settings(recorded):
    return {
        "extra_plugins": [recorded],
        "platform": "recorded",
        "plugins": (),
        "max_running_requests": 3,
        "page_size": 8,
    }


@pytest.fixture(scope="module")
def eager(recorded):
    """Accepted drafts of the same kernels without captures, by kind of drafting."""
    found = {}
    for kind in (CHAIN, TREE):
        stats = everything(**kind, **eager_settings(recorded), disable_graph=True)[1]
        found[kind.get("speculative_eagle_topk", 1)] = stats.accepted_tokens
    return found


@pytest.mark.parametrize(
    "how",
    [
        "prepared inside",
        pytest.param("prepared in front", marks=pytest.mark.slow),
        pytest.param("rehearsed", marks=pytest.mark.slow),
    ],
)
@DRAFTING
def test_every_kind_of_request(recorded, plain, eager, drafting, how, monkeypatch):
    """Logprobs, penalties, biases, stop strings, grammars, in batches between and at the sizes."""
    set_up(recorded, monkeypatch, how)
    captured = {"graph_sizes": (1, 3), **WHOLE}
    found, stats = everything(**drafting, **eager_settings(recorded), **captured)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours[:3] == theirs[:3]
        for a, b in zip(ours[3] or (), theirs[3] or (), strict=True):
            assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)
    accepted = eager[drafting.get("speculative_eagle_topk", 1)]
    assert stats.accepted_tokens == accepted > 20 and stats.cached_tokens
    # Pieces between attentions; then per size a verification, the draft layer behind it, and
    # beside these the draws and the chain, or else each level of the tree.
    replays = recorded.Recorded.backend.replays
    pieces = load_config(resolve_model("demo")).layers + 1
    assert len(replays) == pieces + 8 and all(replays)


def test_sizes_that_no_step_could_verify_are_said(recorded):
    """Three requests with two drafts each are nine tokens."""
    ours = {"platform": "recorded", "plugins": (), "extra_plugins": [recorded], "prefix_chunk": 8}
    with LLM(
        "demo", **{**SETTINGS, **CHAIN, **ours, "max_step_tokens": 8, "graph_sizes": (1, 3)}
    ) as llm:
        said = "steps of more requests than 1, since 3 of 3 tokens are over --max-step-tokens 8"
        assert said in llm.banner


def run(settings, plugins=()):
    """A runner, warm, whose caches are NaN where nothing was written."""
    assembly = assemble(EngineConfig(**settings), settings, plugins)
    runner = Runner(assembly, World.alone(), poison=True)
    runner.warm_up()
    return runner


def driven(runner, aborted):
    """Tokens of four requests, one of which is aborted; how many were preempted; whether any
    draft was right."""
    engine = Engine(runner.assembly, runner)
    for i in range(4):
        params = SamplingParams(max_tokens=22, ignore_eos=True, temperature=i % 2)
        prompt = [40 + i, 90, 5, 7] * 4
        engine.submit(Submit(rid=str(i), prompt=prompt, params=params, seed=i))
    tokens = {str(i): [] for i in range(4)}
    while engine.has_work:
        for message in engine.step():
            tokens[message.rid] += message.tokens
        if aborted in tokens and len(tokens[aborted]) > 9:
            engine.abort([aborted])
            del tokens[aborted]
    holdings, stats = engine.scheduler.holdings, engine.stats()
    assert holdings.num_free + holdings.num_cached == runner.num_pages, "a page is lost"
    engine.close()
    return tokens, stats.preemptions, stats.accepted_tokens > 0


CROWDED = {**SETTINGS, "context_length": 40, "page_size": 4, "max_step_tokens": 40}


@pytest.fixture(scope="module")
def undrafted():
    return driven(run(CROWDED), "2")[0]


@pytest.mark.parametrize("drafting", [CHAIN, TREE, ADAPTIVE], ids=("chain", "tree", "adaptive"))
@pytest.mark.parametrize("captured", [True, False])
def test_aborts_and_preemption(recorded, undrafted, drafting, captured):
    """Four requests of 38 tokens, and pages for 80."""
    settings = {**CROWDED, "platform": "recorded", "plugins": (), "kv_memory": 1_110_000}
    settings |= {"graph_sizes": (4,)} if captured else {"disable_graph": True}
    settings |= drafting
    found, preempted, drafted = driven(run(settings, [recorded]), "2")
    assert found == undrafted and len(found) == 3 and preempted
    assert drafted or drafting is ADAPTIVE  # where it may not have paid
    assert not captured or any(recorded.Recorded.backend.replays)


@DRAFTING
@pytest.mark.parametrize("shape", ["tiny-v3", "tiny-v32"], ids=("fp8", "sparse"))
def test_formats_and_sparse_attention(recorded, made, shape, drafting):  # noqa: F811
    ours = {"platform": "recorded", "plugins": (), "extra_plugins": (recorded,)}
    plain, _ = once(made[shape], **ours, disable_graph=True)
    found, stats = answers(made[shape], **ours, **drafting, **WHOLE)
    assert found == plain and stats.draft_tokens > 0
    assert all(recorded.Recorded.backend.replays)


@DRAFTING
def test_adapters(recorded, adapter, drafting):  # noqa: F811
    settings = {**adapter, "max_running_requests": 2}
    plain, _ = once("demo", adapters=("a", None), **settings)
    settings |= {"platform": "recorded", "plugins": (), "extra_plugins": [recorded]}
    found, stats = answers("demo", adapters=("a", None), **settings, **drafting, **WHOLE)
    assert found == plain and stats.accepted_tokens > 0
    assert all(recorded.Recorded.backend.replays)
