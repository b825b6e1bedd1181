"""Caches of DeepSeek-V4 are exact: snapshots, preemption, mixed steps, drafts taken back."""

from __future__ import annotations

import random

import pytest
from hybrid_models import BASE, GREEDY, SCORED, SETTINGS, HybridOracle, compare
from model_harness import Harness, run_schedule

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.offline.llm import LLM
from ds_runtime.sampling_params import SamplingParams
from parts import mostly_slow


def test_a_prompt_goes_on_from_a_snapshot(six):
    """At the last page boundary that it does not fill, and behind an answer; else from the start,
    and without a snapshot always."""
    folder, oracle = six
    base = oracle.prompt(290, 7)
    others = [[*base, 5, 6, 7], [*base[:140], 9, 9], [*base[:257], *oracle.prompt(40, 8)]]
    for snapshots, hits in ((8, [256, 128, 256]), (0, [0, 0, 0])):
        with LLM(folder, **SETTINGS, state_snapshots=snapshots, chunked_prefill_size=100) as llm:
            (first,) = llm.generate([base], GREEDY)
            assert first.usage.cached_tokens == 0
            llm.generate([base[:130]], GREEDY)  # leaves a snapshot at its first page
            for prompt, hit in zip(others, hits, strict=True):
                (output,) = llm.generate([prompt], GREEDY)
                assert output.usage.cached_tokens == hit
                compare(oracle, [prompt], [output], scored=False, least=0)
            turn = [*base, *first.outputs[0].token_ids, *oracle.prompt(90, 9)]
            outputs = llm.generate([turn, [*turn, 3]], GREEDY)
            compare(oracle, [turn, [*turn, 3]], outputs, scored=False, least=0)


@pytest.mark.parametrize("together", [False, True])
def test_prompts_go_on_where_others_left(six, together):
    """At a page that no prompt ends with: from the second that leaves there, or of several at once
    all but the one that computes it."""
    folder, oracle = six
    base = oracle.prompt(400, 11)
    prompts = [base, *([*base[:300], *oracle.prompt(20 + n, 12 + n)] for n in range(3))]
    with LLM(folder, **SETTINGS, state_snapshots=8, chunked_prefill_size=100) as llm:
        groups = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = [output for group in groups for output in llm.generate(group, GREEDY)]
    assert [o.usage.cached_tokens for o in outputs] == [0, 256 if together else 0, 256, 256]
    compare(oracle, prompts, outputs, scored=False, least=0)


def test_whoever_is_preempted_answers_the_same(six):
    folder, oracle = six
    given = {**SETTINGS, "max_running_requests": 4, "state_snapshots": 0}
    sizes = assemble(EngineConfig(model=folder, **given)).cache_sizes
    prompts = [oracle.prompt(n, n) for n in (120, 121, 122, 123)]
    memory = 5 * sizes.state + 6 * sizes.page
    with LLM(folder, **given, kv_memory=memory, disable_radix_cache=True) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=250, logprobs=0, ignore_eos=True))
        assert llm.stats().preemptions > 0
        compare(oracle, prompts, outputs, scored=False)


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_any_kind(six, seed):
    """Whole, chunked, mixed and decoding, in pages and blocks of any order; nothing that is not a
    sequence's own is read or written."""
    folder, oracle = six
    harness = Harness(assemble(EngineConfig(model=folder, **SETTINGS)), pages=32)
    prompts = [oracle.prompt(n, 30 + n) for n in (1, 50, 131, 260)]
    found = run_schedule(harness, prompts, seed, [7, 40, 200][seed])
    for tokens, logits in zip(prompts, found, strict=True):
        assert (logits.log_softmax(-1) - oracle.logprobs(tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_taken_back(six, seed):
    """Steps verify three tokens of which any number is wrong, across ends of windows and pages;
    without room for them in the rings it is told apart."""
    folder, oracle = six
    assembly, draw = assemble(EngineConfig(model=folder, **SETTINGS)), random.Random(seed)
    (tokens,) = [oracle.prompt(300, 70 + seed)]
    want = oracle.logprobs(tokens)

    def error(undo):
        harness = Harness(assembly, pages=8, undo=undo)
        (sequence,) = harness.sequences([tokens], seed)
        harness.step([(sequence, 100)])
        worst = 0.0
        while sequence.done < len(tokens):
            rest = tokens[sequence.done : sequence.done + 4]
            right = draw.randint(1, len(rest))
            tried = rest[:right] + [draw.randrange(131) for _ in rest[right:]]
            logits = harness.verify(sequence, tried)[:right].log_softmax(-1)
            worst = max(worst, float((logits - want[sequence.done :][:right]).abs().max()))
            sequence.done += right
        return worst

    assert error(3) < 1e-4
    assert not error(0) < 1e-2


@pytest.mark.parametrize(
    "more",
    mostly_slow(
        [
            {"tp": 2, "ep": 2, "enable_dp_attention": True},
            {"tp": 2},
            {"tp": 2, "enable_dp_attention": True},
            {"tp": 4},
            {"tp": 2, "ep": 2},
            {"tp": 4, "ep": 2},
            {"tp": 4, "ep": 2, "enable_dp_attention": True, "dp": 2},
        ],
        2,
    ),
    ids=lambda more: " ".join(more),
)
def test_ranks_answer_as_one(tmp_path, more):
    """Heads, groups and experts are divided, and token ids reach the experts of every rank."""
    oracle = HybridOracle({**BASE, "o_groups": 4}, seed=3)
    oracle.model.save_pretrained(tmp_path)
    prompts = [oracle.prompt(n, n) for n in (5, 129, 200)]
    with LLM(tmp_path, **{**SETTINGS, "kv_memory": "50MB"}, **more) as llm:
        compare(oracle, prompts, llm.generate(prompts, SCORED))
