"""Verification keeps the model's distribution, whatever the drafts are drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_runtime.engine.speculate.acceptance import claim, judge
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.engine.step.result import sort_rows
from ds_runtime.engine.step.sampler import Sampler
from ds_runtime.engine.step.streams import stream_key, uniforms
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.ops.reference import sampling
from ds_runtime.ops.table import Ops
from ds_runtime.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB, ROWS, DRAFTS = 5, 4000, 2
# The 99.9 % point of χ² with 24 degrees of freedom (tables: 51.18).
LIMIT = 51.18


def draw(logits, positions, keys):
    """Tokens of the reference sampler at temperature 1: logits [rows, vocab]."""
    ones = torch.ones(len(keys))
    draws = torch.from_numpy(uniforms(keys, np.array(positions)))
    args = (ones, torch.zeros(len(keys), dtype=torch.int32), ones, ones * 0, draws.double())
    return sampling.sample(logits, *args)


def step(width=DRAFTS + 1):
    works = [Work(rid=str(r), row=r, start=7, length=width, pages=[r]) for r in range(ROWS)]
    plan = StepPlan(step=0, works=works, drafts=DRAFTS)
    return plan, sort_rows(plan, lambda row: ())


@pytest.mark.parametrize("drafter", ["good", "bad", "greedy"])
def test_kept_tokens_have_the_models_distribution(drafter):
    """Two tokens of a Markov chain, kept or replaced: their joint counts against p · p."""
    random = np.random.default_rng(3)
    model = torch.tensor(random.normal(size=(VOCAB, VOCAB)), dtype=torch.float32)
    other = torch.tensor(random.normal(size=(VOCAB, VOCAB)), dtype=torch.float32)
    guess = {"good": model + 0.3 * other, "bad": other, "greedy": 60 * model}[drafter]
    plan, wanted = step()
    keys = [stream_key(seed, 0) for seed in range(ROWS)]
    inputs = [torch.zeros(ROWS, dtype=torch.int64)]  # the last token is 0 everywhere
    for j in range(DRAFTS):
        inputs.append(draw(guess[inputs[-1]], [8 + j] * ROWS, keys))
    stacked = torch.stack(inputs, 1)  # [rows, width]
    ops = Ops.of({"sample": sampling.sample, "logprobs": sampling.logprobs}, "sampler")
    sampler = Sampler(ops, ROWS, VOCAB, CPU, DRAFTS + 1)
    for seed in range(ROWS):
        params = SamplingParams(temperature=1.0)
        sampler.start(RowInit(row=seed, params=params, seed=seed, choice=0, prompt=[0]))
    sent = Upload(CPU)
    draws = sampler.prepare(wanted.draws, sent)
    claims = claim(plan, wanted, DRAFTS + 1, sent)
    sent.send()
    front = stacked.flatten()[sent[claims.inputs]]
    tokens = sampler.draw(model[front], draws, sent, front)
    accepted = judge(claims, tokens, front, sent)
    by_row = tokens.view(ROWS, -1)
    right = (by_row[:, :-1] == stacked[:, 1:]).long().cumprod(1).sum(1)
    assert torch.equal(accepted, right)
    assert 0 < accepted.sum() < ROWS * DRAFTS
    # Where the first draft was wrong, the next step draws the second token, with its own number.
    first = by_row[:, 0]
    later = draw(model[first], [9] * ROWS, keys)
    second = torch.where(accepted > 0, by_row[:, 1], later)
    assert torch.equal(second, later), "a kept token is the one that the model would have drawn"
    p = model.double().softmax(1)
    expected = ROWS * p[0].unsqueeze(1) * p
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    counts.index_put_((first, second), torch.ones(ROWS, dtype=torch.float64), accumulate=True)
    assert ((counts - expected) ** 2 / expected).sum() < LIMIT


def test_simulated_acceptance_is_the_probability_of_each_draft():
    plan, wanted = step(width=4)
    sent = Upload(CPU)
    claims = claim(plan, wanted, 4, sent, simulated=0.8)
    sent.send()
    none = torch.zeros(ROWS * 4, dtype=torch.int64)
    accepted = judge(claims, none, none + 1, sent).double()
    assert accepted.mean() == pytest.approx(0.8 + 0.64 + 0.512, abs=0.06)


def test_works_of_any_length_are_judged_apart():
    works = [
        Work(rid="a", row=0, start=5, length=3, pages=[0]),
        Work(rid="b", row=1, start=5, length=1, pages=[1]),
        Work(rid="c", row=2, start=5, length=2, pages=[2]),
        Work(rid="d", row=3, start=0, length=2, pages=[3], tokens=[1, 2]),
    ]
    plan = StepPlan(step=0, works=works)
    wanted = sort_rows(plan, lambda row: ())
    sent = Upload(CPU)
    claims = claim(plan, wanted, 3, sent)
    sent.send()
    last = torch.tensor([9, 4, 6, 9, 0, 0, 9, 8, 0, 9, 0, 0])  # three per row
    inputs = last[sent[claims.inputs]]
    assert inputs.tolist() == [9, 4, 6, 9, 9, 8, 9]
    tokens = torch.tensor([4, 6, 1, 4, 7, 8, 8])  # per draw; of c the draft is 8, the draw 7
    assert judge(claims, tokens, inputs, sent).tolist() == [2, 0, 0, 0]
