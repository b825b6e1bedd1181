"""DeepSeek-V4's steps as recordings: the bits of steps op by op, whatever closes in them."""

from __future__ import annotations

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_cpu.graphs import HostGraphs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Layers of every kind, experts in FP4 and the rest in FP8."""
    folder = tmp_path_factory.mktemp("v4")
    make_checkpoint(folder, "v4-tiny", "fp4", 0)
    return str(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "trained_rounding": True},
        {"dtype": "float32", "tp": 2, "chunked_prefill_size": 50},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_answers_are_those_of_steps_op_by_op(model, monkeypatch, settings):
    """Requests come and go, windows of 4 and of 128 tokens close in recorded steps, and more
    entries are there than the indexer keeps."""
    found, replays, capture = [], [], HostGraphs.capture

    def counted(self, run):
        replay = capture(self, run)

        def counting():
            replays.append(1)
            replay()

        return counting

    monkeypatch.setattr(HostGraphs, "capture", counted)
    prompts = [[(7 * i + 5 * j) % 500 + 2 for j in range(n)] for i, n in enumerate((3, 112, 244))]
    params = [
        SamplingParams(max_tokens=44, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=28, ignore_eos=True, temperature=0.8, seed=3),
        SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1),
    ]
    common = {"platform": "cpu", "threads": 1, "context_length": 512, **settings}
    for disable_graph in (True, False):
        with LLM(model, disable_graph=disable_graph, **common) as llm:
            if not disable_graph:
                assert "disable_graph" not in [name for name, *_ in llm._assembly.plan.changes]
            outputs = llm.generate(prompts, params)
            found.append([(o.token_ids, o.logprobs) for o in outputs])
        assert bool(replays) is not disable_graph
    assert found[0] == found[1]
    assert len(replays) > 15
