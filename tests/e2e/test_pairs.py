"""Everything goes with everything on two ranks: runs that cover each pair of what can be on.

A run has one level of each factor. Its answers are those of one rank with the same model, cache
and adapters: drafts, graphs, kept prefixes and the layout of ranks change none.
"""

from __future__ import annotations

import itertools
import random
import shutil
from functools import cache
from pathlib import Path

import pytest

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.description.hf import load_config
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime_bench import shapes
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_kit.models.adapters import write_adapter
from ds_runtime_kit.models.answers import check_float32
from ds_runtime_kit.support import APART
from parts import some_of

SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"
SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": 8_000_000,
    "context_length": 256,
    "threads": 1,
    "max_running_requests": 6,
    "chunked_prefill_size": 24,
    "page_size": 8,
    "dist_timeout": 60,
}
CHAIN = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
TREE = {**CHAIN, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
LEVELS = {
    "attention": {"by heads": {}, "by sequences": {"enable_dp_attention": True}},
    "experts": {"by width": {}, "by number": {"ep": 2}},
    "drafts": {"none": {}, "chain": CHAIN, "tree": TREE},
    "graphs": {"off": {"disable_graph": True, "disable_prefill_graph": True}, "on": {}},
    "prefixes": {"off": {"disable_radix_cache": True}, "on": {}},
    "adapters": {"off": {}, "on": {}},
    "cache": {"float32": {}, "fp8": {"kv_cache_dtype": "fp8"}},
    "masks": {"off": {}, "on": {}},
    "model": {"dense": {}, "sparse": {}},
    "bits": {"free": {}, "invariant": {"batch_invariant": True}},
}
CHANGING = ("adapters", "cache", "masks", "model", "bits")  # what answers depend on
FIRST = {factor: next(iter(levels)) for factor, levels in LEVELS.items()}


REFUSED = {  # as docs/support.md calls them
    (("bits", "invariant"), ("drafts", "tree")): (
        "`--speculative-eagle-topk`",
        "`--batch-invariant`",
    ),
    (("bits", "invariant"), ("form", "expanded")): ("`--disable-mla`", "`--batch-invariant`"),
    (("form", "expanded"), ("model", "sparse")): ("`--disable-mla`", "sparse attention"),
}
OTHERS = {"form": {"expanded": {"disable_mla": True}}}  # which no run has: one rank's tests do


def pairs_of(run):
    """Every two levels that are together in a run."""
    return set(itertools.combinations(sorted(run.items()), 2))


def every_pair():
    some = sorted(LEVELS.items())
    return {
        ((a, x), (b, y))
        for (a, first), (b, second) in itertools.combinations(some, 2)
        for x in first
        for y in second
        if ((a, x), (b, y)) not in REFUSED
    }


def covering(seed=0, tries=60):
    """Runs that have every pair between them but those that are refused: each is the best of some
    that are drawn at random and then bettered factor by factor."""

    def worth(run):
        pairs = pairs_of(run)
        return -1 if pairs & REFUSED.keys() else len(pairs & left)

    draw, left, runs = random.Random(seed), every_pair(), []
    while left:
        best = None
        for _ in range(tries):
            run = {factor: draw.choice(sorted(levels)) for factor, levels in LEVELS.items()}
            for factor in draw.sample(sorted(LEVELS), len(LEVELS)):
                some = [{**run, factor: level} for level in sorted(LEVELS[factor])]
                run = max(some, key=worth)
            if best is None or worth(run) > worth(best):
                best = run
        runs.append(best)
        left -= pairs_of(best)
    return runs


RUNS = min((covering(seed) for seed in range(8)), key=len)


def test_runs_have_every_pair_and_are_few():
    assert set().union(*map(pairs_of, RUNS)) == every_pair()
    assert 6 <= len(RUNS) <= 12


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny):
    """Random checkpoints with a draft layer, and adapters of them, by the level of `model`."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for level, shape in (("dense", "tiny-v3"), ("sparse", "tiny-v32")):
            raw = {**shapes.SHAPES[shape], "num_nextn_predict_layers": 1}
            patch.setattr(shapes, "SHAPES", {**shapes.SHAPES, shape: raw})
            folder = make_checkpoint(tmp_path_factory.mktemp(shape), shape, "float32")
            for file in tiny.glob("tokenizer*"):
                shutil.copy(file, folder)
            config = load_config(folder)
            for seed, (name, all_) in enumerate({"a": False, "e": True}.items()):
                own = folder / f"adapter-{name}"
                wanted = (lambda m: True) if all_ else (lambda m: ".experts." not in m)
                write_adapter(own, config, wanted, rank=4, seed=seed)
            found[level] = folder
    return found


def ask(llm, run):
    """Greedy and sampled requests in mixed batches, some of which begin alike."""
    draw, params = random.Random(3), []
    lengths = (5, 40, 21, 60, 1, 33)
    prompts = [[draw.randrange(2, 250) for _ in range(n)] for n in lengths]
    masks = run["masks"] == "on"
    for i in range(len(prompts)):
        rules = OutputRules(regex="(a|bc){6,9}") if masks and i % 2 else None
        params.append(
            SamplingParams(
                max_tokens=10 + i,
                temperature=0.7 * (i % 3 == 1),
                seed=i,
                ignore_eos=rules is None,
                rules=rules,
                logprobs=0,
            )
        )
    names = ([None, "a", "e"] * 2) if run["adapters"] == "on" else [None] * 6
    extra = {"lora": names} if any(names) else {}
    first = llm.generate(prompts, params, **extra)
    longer = [[*prompt, 7, 8] for prompt in prompts[:4]]
    extra = {"lora": names[:4]} if any(names) else {}
    return first + llm.generate(longer, params[:4], **extra)


def settings_of(run, made):
    given = dict(SETTINGS)
    for factor, level in run.items():
        given |= {**LEVELS, **OTHERS}[factor][level]
    if run["adapters"] == "on":
        folder = made[run["model"]]
        given["lora"] = tuple(f"{name}={folder / f'adapter-{name}'}" for name in "ae")
    return given


@pytest.fixture(scope="module")
def alone(made):
    @cache
    def answers(levels):
        run = {**FIRST, **dict(levels)}
        with LLM(made[run["model"]], **settings_of(run, made)) as llm:
            return ask(llm, run)

    return lambda run: answers(tuple((factor, run[factor]) for factor in CHANGING))


def check(run, made, alone):
    expected = alone(run)
    with LLM(made[run["model"]], **settings_of(run, made), tp=2) as llm:
        found = ask(llm, run)
        stats, plan = llm.stats(), llm.plan
    assert (plan.ep, plan.attn_dp) == (
        1 + (run["experts"] == "by number"),
        1 + (run["attention"] == "by sequences"),
    )
    assert (stats.draft_tokens > 0) == (run["drafts"] != "none")
    assert any(o.usage.cached_tokens for o in found) == (run["prefixes"] == "on")
    if run["cache"] == "fp8":
        # Ranks sum in another order, which tells near the middle of two codes. And a prompt of one
        # token attends its key rounded or not, as its step has others: that is 0.011 here.
        pairs = [(a.logprobs[0], b.logprobs[0]) for a, b in zip(found, expected, strict=True)]
        assert all(abs(a.logprob - b.logprob) < 2e-2 for a, b in pairs)
    else:
        check_float32(found, expected, 1e-4)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: ", ".join(run.values()))
def test_answers_are_those_of_one_rank(made, alone, run):
    check(run, made, alone)


@pytest.mark.parametrize("pair", REFUSED, ids=str)
def test_a_refused_pair_is_a_sentence_and_its_reason_is_told(made, pair):
    run = {**FIRST, **dict(pair)}
    flag = "--disable-mla" if "form" in dict(pair) else "--batch-invariant"
    with pytest.raises((ConfigError, UnsupportedError), match=flag):
        LLM(made[run["model"]], **settings_of(run, made), tp=2)
    rows = [line for line in SUPPORT.read_text().splitlines() if line.startswith("|")]
    assert any(all(word in row for word in REFUSED[pair]) for row in rows)
    assert len(REFUSED) == len(APART)


BY_ITSELF = sorted(p for p in every_pair() if all(FIRST[f] != level for f, level in p))


@pytest.mark.slow
@pytest.mark.parametrize("pair", some_of(BY_ITSELF, 8), ids=str)
def test_each_pair_by_itself(made, alone, pair):
    """Nothing else is on that could hide what two do to each other: all of a release, some of each
    run. Each pair is in the runs above as well.
    """
    check({**FIRST, **dict(pair)}, made, alone)
