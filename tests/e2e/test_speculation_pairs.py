"""Drafts beside what else may be on: FP8, adapters, sparse attention, several ranks. Answers are
those without drafts, token for token, in float32.
"""

from __future__ import annotations

from functools import cache

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.description.hf import load_config
from ds_runtime_bench import shapes
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_kit.models.adapters import write_adapter

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": 8_000_000,
    "context_length": 192,
    "threads": 1,
    "max_running_requests": 3,
    "chunked_prefill_size": 16,
    "page_size": 8,
}
CHAIN = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
TREE = {**CHAIN, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
DIVIDED = {"tp": 2, "enable_dp_attention": True, "dist_timeout": 60}
GROUPS = {**DIVIDED, "tp": 4, "dp": 2}  # heads are divided inside each
ADAPTIVE = {**CHAIN, "speculative_adaptive": True}


def answers(model, vocab=400, adapters=(None,), **settings):
    """Greedy and sampled, behind prompts shorter and longer than an index choice."""
    prompts = [[(7 * i + j * j) % vocab for j in range(n)] for i, n in enumerate((5, 40, 21, 60))]
    params = [
        SamplingParams(max_tokens=14, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    names = [adapters[i % len(adapters)] for i in range(len(prompts))]
    with LLM(str(model), **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate(prompts, params, **({"lora": names} if any(names) else {}))
        again = llm.generate(prompts[:2], params[:2], **({"lora": names[:2]} if any(names) else {}))
        return [o.token_ids for o in (*outputs, *again)], llm.stats()


@cache
def _once(model, adapters, settings):
    return answers(model, adapters=adapters, **dict(settings))


def once(model, adapters=(None,), **settings):
    """`answers`, which several tests hold theirs against, from one engine."""
    return _once(str(model), adapters, tuple(sorted(settings.items())))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Settings with an adapter of all of the demo but its experts."""
    folder = tmp_path_factory.mktemp("adapters") / "a"
    config = load_config(resolve_model("demo"))
    write_adapter(folder, config, lambda module: ".mlp.experts." not in module, rank=4)
    return {"lora": (f"a={folder}",)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Random checkpoints with a draft layer, by the name of their shape."""
    with pytest.MonkeyPatch.context() as patch:
        folders = {}
        sharing = {**shapes.SHAPES["tiny-v32"], "num_hidden_layers": 4}
        sharing["index_topk_pattern"] = "FSFS"
        patch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "sharing": sharing})
        for shape, dtype in (("tiny-v3", "fp8"), ("tiny-v32", "float32"), ("sharing", "float32")):
            raw = {**shapes.SHAPES[shape], "num_nextn_predict_layers": 1}
            patch.setattr(shapes, "SHAPES", {**shapes.SHAPES, shape: raw})
            folders[shape] = make_checkpoint(tmp_path_factory.mktemp(shape), shape, dtype)
        return folders


@pytest.mark.parametrize(
    ("shape", "drafting", "settings"),
    [
        ("tiny-v3", CHAIN, {}),
        ("tiny-v3", TREE, {}),
        ("tiny-v3", CHAIN, {"pin": ("mla_decode=reference",)}),
        ("tiny-v3", TREE, {"pin": ("mla_decode=reference",)}),
        ("tiny-v3", CHAIN, {"disable_mla": True}),
        ("tiny-v3", TREE, {"disable_mla": True}),
        ("tiny-v32", CHAIN, {}),
        ("tiny-v32", ADAPTIVE, {}),
        ("tiny-v32", TREE, {}),
        ("tiny-v32", TREE, {"kv_cache_dtype": "fp8"}),
        ("sharing", CHAIN, {}),
        ("sharing", TREE, {}),
    ],
    ids=(
        *("fp8-chain", "fp8-tree", "reference-chain", "reference-tree"),
        *("expanded-chain", "expanded-tree"),
        *("sparse-chain", "sparse-adaptive", "sparse-tree", "sparse-tree-scaled"),
        *("sharing-chain", "sharing-tree"),
    ),
)
def test_with_formats_kernels_and_sparse_attention(made, shape, drafting, settings):
    plain, _ = once(made[shape], **settings)
    found, stats = answers(made[shape], **drafting, **settings)
    assert found == plain
    assert stats.draft_tokens > 0 and 0 <= stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("drafting", [CHAIN, TREE], ids=("chain", "tree"))
def test_with_adapters(adapter, drafting):
    """They change the model and not the drafts: fewer are right, and answers are the adapter's."""
    plain, _ = once("demo", adapters=("a", None), **adapter)
    found, stats = answers("demo", adapters=("a", None), **adapter, **drafting)
    assert found == plain and stats.accepted_tokens > 0
    assert plain != once("demo")[0]


def test_drafts_of_divided_sequences_are_as_often_right():
    """Wrong drafts change no answer: what is accepted shows whose tokens they were made from."""
    drafting = {**CHAIN, "speculative_num_steps": 3, "context_length": 256}
    plain, alone = answers("demo", **drafting)
    found, divided = answers("demo", **DIVIDED, **drafting)
    assert found == plain and alone.accepted_tokens > alone.draft_tokens // 8
    assert divided.accepted_tokens == alone.accepted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("divided", [DIVIDED, GROUPS], ids=("ranks", "groups"))
@pytest.mark.parametrize(
    ("shape", "drafting"),
    [
        ("tiny-v3", CHAIN),
        ("tiny-v3", TREE),
        ("tiny-v32", CHAIN),
        ("tiny-v32", TREE),
        ("tiny-v32", ADAPTIVE),
    ],
)
def test_with_sequences_divided(made, shape, drafting, divided):
    plain, _ = once(made[shape])
    found, stats = answers(made[shape], **divided, **drafting)
    assert found == plain
    assert stats.draft_tokens > 0 and 0 <= stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize(
    ("drafting", "divided"),
    [
        pytest.param(CHAIN, DIVIDED, marks=pytest.mark.slow),
        pytest.param(TREE, DIVIDED, marks=pytest.mark.slow),
        pytest.param(CHAIN, GROUPS, marks=pytest.mark.slow),
        pytest.param(TREE, GROUPS, marks=pytest.mark.slow),
    ],
    ids=("chain", "tree", "chain-groups", "tree-groups"),
)
def test_with_sequences_and_adapters_divided(adapter, recorded, drafting, divided):
    """Verifications, drafts and prompts are captured, and one step is ahead of the host."""
    config = load_config(resolve_model("demo"))
    settings = {**adapter, "max_running_requests": 4}
    plain, alone = once("demo", adapters=("a", None), **settings, **drafting)
    settings |= {"platform": "recorded", "plugins": (), "extra_plugins": [recorded]}
    settings |= {"graph_sizes": (1, 2, 4), "prefill_graph_sizes": (128,)}
    found, stats = answers("demo", adapters=("a", None), **settings, **divided, **drafting)
    assert found == plain
    assert stats.accepted_tokens == alone.accepted_tokens > 0
    replays = recorded.Recorded.backend.replays
    pieces = config.layers + 1
    assert len(replays) == pieces + 3 * 4 and all(replays[:pieces])
    assert sum(count > 0 for count in replays[pieces:]) >= 4, "those of one size"


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [CHAIN, TREE, ADAPTIVE], ids=("chain", "tree", "adaptive"))
def test_with_two_ranks(made, drafting):
    plain, _ = once(made["tiny-v3"])
    found, stats = answers(made["tiny-v3"], tp=2, **drafting)
    assert found == plain and stats.draft_tokens > 0


def test_ranks_that_divide_sequences_draft_for_their_own():
    """As many drafts are right as on one rank: those of another's sequences would not be."""
    settings = {
        "platform": "cpu",
        "dtype": "float32",
        "kv_memory": "60MB",
        "threads": 1,
        "context_length": 512,
    }
    settings |= {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
    asked = [f"{a}+{b}=" for a, b in ((12, 30), (7, 5), (40, 41), (3, 99), (25, 17), (64, 8))]
    right = []
    for more in ({}, {"tp": 2, "enable_dp_attention": True}):
        with LLM("demo", **settings, **more) as llm:
            llm.generate(asked, SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True))
            found = llm._alive().stats()
        right.append(found.accepted_tokens / found.draft_tokens)
    assert right[1] > 0.95 * right[0] > 0.2, right
