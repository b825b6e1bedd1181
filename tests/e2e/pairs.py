"""Everything that can be on, and runs that cover pairs of it: of ranks on the host and on devices.

A run has one level of each factor. Its answers are those of one rank with the same model, cache
and adapters: drafts, graphs, kept prefixes and the layout of ranks change none.
"""

from __future__ import annotations

import itertools
import random
import shutil
from typing import Any

import pytest

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.description.hf import load_config
from ds_runtime.offline.outputs import RequestOutput
from ds_runtime_bench import shapes
from ds_runtime_bench.checkpoints.checkpoint import make_checkpoint
from ds_runtime_kit.models.adapters import write_adapter
from ds_runtime_kit.models.answers import NEAR, check_coarse, check_float32

MOVED = 4 * NEAR  # of a token that another expert served: on CPUs 0.09 at most
CHAIN: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
TREE = {**CHAIN, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
LEVELS: dict[str, dict[str, dict[str, Any]]] = {
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
    "steps": {
        "whole": {},
        "halves": {"enable_two_batch_overlap": True, "dbo_prefill_token_threshold": 8},
    },
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
IDLE = {  # one of them then changes nothing, as `ds-runtime plan` says
    (("attention", "by sequences"), ("steps", "halves")),
    (("bits", "invariant"), ("steps", "halves")),
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
        if ((a, x), (b, y)) not in {*REFUSED, *IDLE}
    }


def covering(wanted, seed=0, apart=lambda run: False, tries=15):
    """Runs that have all wanted pairs between them, and none that is refused: each is the best of
    some that are drawn at random and then bettered factor by factor. apart: runs that are refused
    as a whole."""

    def worth(run):
        pairs = pairs_of(run)
        return -1 if pairs & {*REFUSED, *IDLE} or apart(run) else len(pairs & left)

    draw, left, runs = random.Random(seed), set(wanted), []
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


def fewest(wanted, apart=lambda run: False):
    """The fewest such runs of some draws."""
    return min((covering(wanted, seed, apart) for seed in range(8)), key=len)


def checkpoints(factory, tokenizers, dtype="float32", **dims):
    """Random checkpoints with a draft layer, and adapters of them, by the level of `model`. dims:
    what is other in both, `index_` in the sparse one."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for level, shape in (("dense", "tiny-v3"), ("sparse", "tiny-v32")):
            own = {k: v for k, v in dims.items() if level == "sparse" or not k.startswith("index_")}
            raw = {**shapes.SHAPES[shape], "num_nextn_predict_layers": 1, **own}
            patch.setattr(shapes, "SHAPES", {**shapes.SHAPES, shape: raw})
            folder = make_checkpoint(factory.mktemp(shape), shape, dtype)
            for file in tokenizers.glob("tokenizer*"):
                shutil.copy(file, folder)
            config = load_config(folder)
            for seed, (name, all_) in enumerate({"a": False, "e": True, "d": False}.items()):
                place = folder / f"adapter-{name}"
                wanted = (lambda m: True) if all_ else (lambda m: ".experts." not in m)
                write_adapter(place, config, wanted, rank=4, seed=seed)
            found[level] = folder
    return found


def ask(llm: LLM, run, best=0, lengths=(5, 40, 21, 60, 1, 33)) -> list[RequestOutput]:
    """Greedy and sampled requests in mixed batches, some of which begin alike. best: alternatives
    whose log-probabilities are told."""
    draw, params = random.Random(3), []
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
                logprobs=best,
            )
        )
    names = ([None, "a", "e"] * 2) if run["adapters"] == "on" else [None] * 6
    extra = {"lora": names} if any(names) else {}
    first = llm.generate(prompts, params, **extra)
    longer = [[*prompt, 7, 8] for prompt in prompts[:4]]
    extra = {"lora": names[:4]} if any(names) else {}
    return first + llm.generate(longer, params[:4], **extra)


def settings_of(run, made, base, second="e"):
    """Of an engine: base, and what is on. second: of the checkpoint's adapters, that which requests
    call "e". It adapts the experts, and no step is captured with it, but for "d"."""
    given = dict(base)
    for factor, level in run.items():
        given |= {**LEVELS, **OTHERS}[factor][level]
    if run["adapters"] == "on":
        folder = made[run["model"]]
        given["lora"] = (f"a={folder / 'adapter-a'}", f"e={folder / f'adapter-{second}'}")
    return given


def check_served(llm: LLM, run, found: list[RequestOutput], ranks=2) -> None:
    """That what is on was at work."""
    stats, plan = llm.stats(), llm.plan
    assert (plan.ep, plan.attn_dp) == (
        ranks if run["experts"] == "by number" else 1,
        ranks if run["attention"] == "by sequences" else 1,
    )
    assert (stats.draft_tokens > 0) == (run["drafts"] != "none")
    assert (stats.sums.get("all_reduce_async", 0) > 0) == (run["steps"] == "halves")
    assert any(o.usage.cached_tokens for o in found) == (run["prefixes"] == "on")


def check_answers(found, expected, run, tolerance=1e-4):
    """Of float32."""
    if run["cache"] == "fp8":
        # Ranks sum in another order, which tells near the middle of two codes. And a prompt of one
        # token attends its key rounded or not, as its step has others: that is 0.011 here.
        pairs = [(a.logprobs[0], b.logprobs[0]) for a, b in zip(found, expected, strict=True)]
        assert all(abs(a.logprob - b.logprob) < 2e-2 for a, b in pairs)
    else:
        check_float32(found, expected, tolerance)


def check_near(found, expected, run, other):
    """Of coarser dtypes, whose answers have two alternatives: tokens are the same up to a near-tie
    of a greedy answer, and nearly as likely. Where rounding moves a token to another expert, a
    single one differs more. A mask leaves no alternatives to tell a near-tie by, and a sampled
    token may lie at a bound between two.

    other: answers of one device in batches of another size. Its own rounding moves them, and more
    so with adapters, which are large. Two tokens that swap have both moved, so a near-tie is twice
    as wide as that. Ranks may be off by half as much more in the mean.
    """
    own, gaps = gaps_of(other, expected), gaps_of(found, expected)
    near, mean = max(MOVED, 2 * max(own)), max(NEAR / 2, 1.5 * sum(own) / len(own))
    free = [i for i in range(len(found)) if _greedy(i, run)]
    check_coarse([found[i] for i in free], [expected[i] for i in free], near=near)
    said = f"{max(gaps):.3f} of {near:.3f} apart at most, {sum(gaps) / len(gaps):.4f} of {mean:.4f}"
    assert max(gaps) < near and sum(gaps) / len(gaps) < mean, f"{said} in the mean"
    assert len(gaps) > sum(len(b.token_ids) for b in expected) / 2


def gaps_of(found, expected):
    """Of log-probabilities, up to the first token of each answer that differs."""
    gaps = []
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a.logprobs, b.logprobs, strict=False):
            if x.token != y.token:
                break
            gaps.append(abs(x.logprob - y.logprob))
    return gaps


def _greedy(number, run):
    """Whether a request of `ask` takes the best token, without a mask."""
    at = number % 6  # those that continue it follow the first six
    return at % 3 != 1 and not (run["masks"] == "on" and at % 2)
