"""The sampler against formulas written in numpy, and the independence of its draws."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.engine.step.plan import RowInit
from ds_runtime.engine.step.sampler import Draw, Sampler
from ds_runtime.engine.step.streams import stream_key, uniforms
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.ops.reference import sampling
from ds_runtime.ops.table import Ops
from ds_runtime.sampling_params import SamplingParams

VOCAB = 37


class Recorder:
    """`sample` that keeps what it was given."""

    def __init__(self):
        self.logits = None
        self.uniform = None

    def __call__(self, logits, temperature, top_k, top_p, min_p, uniform):
        self.logits, self.uniform = logits.clone(), uniform.clone()
        return sampling.sample(logits, temperature, top_k, top_p, min_p, uniform)


def make(rows=8):
    recorder = Recorder()
    bound = {"sample": recorder, "logprobs": sampling.logprobs}
    ops = Ops.of(bound | {"mask_logits": sampling.mask_logits}, "sampler")
    return Sampler(ops, rows, VOCAB, torch.device("cpu")), recorder


class Drawn(NamedTuple):
    tokens: torch.Tensor
    logprobs: list


def draw(sampler, logits, draws):
    sent = Upload(torch.device("cpu"))
    prepared = sampler.prepare(draws, sent)
    sent.send()
    tokens = sampler.draw(logits, prepared, sent)
    sampler.count(prepared, tokens, sent)
    return Drawn(tokens, sampler.logprobs(logits, prepared, tokens))


def init(row, params, prompt=(1, 2, 3), output=(), seed=0, choice=0, stop_ids=()):
    return RowInit(
        row=row,
        params=params,
        seed=seed,
        choice=choice,
        prompt=list(prompt),
        output=list(output),
        stop_ids=list(stop_ids),
    )


def random_logits(rows, seed=0):
    values = np.random.default_rng(seed).normal(size=(rows, VOCAB)) * 3
    return torch.tensor(values, dtype=torch.float32)


def penalised(logits, prompt, output, p):
    """The formulas of the API: repetition over prompt and output, the others over output."""
    out = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        if out[token] > 0:
            out[token] /= p.repetition_penalty
        else:
            out[token] *= p.repetition_penalty
    for token in set(output):
        out[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    for token, bias in p.logit_bias.items():
        out[token] += bias
    return out


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    before=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    presence=st.sampled_from([0.0, 0.5, -1.5]),
    frequency=st.sampled_from([0.0, 0.25, 2.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
)
def test_penalties_follow_the_formulas_over_several_draws(
    prompt, before, presence, frequency, repetition, bias
):
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
    )
    sampler, seen = make()
    sampler.start(init(2, params, prompt, before))
    output = list(before)
    for step in range(3):
        raw = random_logits(1, step)
        drawn = draw(sampler, raw.clone(), [Draw(2, len(prompt) + len(output))])
        expected = penalised(raw[0].numpy(), prompt, output, params)
        np.testing.assert_allclose(seen.logits[0].numpy(), expected, rtol=1e-5, atol=1e-4)
        output.append(int(drawn.tokens[0]))


def test_a_penalised_neighbour_changes_nothing_for_a_plain_row():
    sampler, seen = make()
    sampler.start(init(0, SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)))
    sampler.start(init(1, SamplingParams()))
    raw = random_logits(2)
    drawn = draw(sampler, raw.clone(), [Draw(0, 3), Draw(1, 3)])
    assert torch.equal(seen.logits[1], raw[1])
    assert int(drawn.tokens[1]) == int(raw[1].argmax())


def test_a_row_forgets_its_last_request():
    sampler, seen = make()
    params = SamplingParams(presence_penalty=1.0)
    sampler.start(init(0, params, output=[5, 6]))
    sampler.start(init(0, params, output=[7]))
    raw = random_logits(1)
    draw(sampler, raw.clone(), [Draw(0, 4)])
    assert torch.equal(seen.logits[0, 5:7], raw[0, 5:7])
    assert torch.isclose(seen.logits[0, 7], raw[0, 7] - 1.0)


def test_min_tokens_forbids_stop_ids_until_reached():
    sampler, _ = make()
    sampler.start(init(0, SamplingParams(min_tokens=2), stop_ids=[4, VOCAB + 9]))
    raw = torch.zeros(1, VOCAB)
    raw[0, 4] = 5.0
    tokens = [int(draw(sampler, raw.clone(), [Draw(0, 3 + i)]).tokens[0]) for i in range(4)]
    assert tokens == [0, 0, 4, 4]


def test_min_tokens_counts_the_output_before_a_preemption():
    sampler, _ = make()
    sampler.start(init(0, SamplingParams(min_tokens=2), output=[9, 9], stop_ids=[4]))
    raw = torch.zeros(1, VOCAB)
    raw[0, 4] = 5.0
    assert int(draw(sampler, raw, [Draw(0, 5)]).tokens[0]) == 4


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_draws_depend_on_seed_choice_and_position_only(order):
    params = SamplingParams(temperature=1.0, top_p=0.95)
    logits = random_logits(1).expand(3, -1).contiguous()
    alone = []
    for choice in range(3):
        sampler, _ = make()
        sampler.start(init(5, params, seed=11, choice=choice))
        alone.append(int(draw(sampler, logits[:1], [Draw(5, 40)]).tokens[0]))
    sampler, _ = make()
    for row, choice in enumerate(order):
        sampler.start(init(row, params, seed=11, choice=choice))
    mixed = draw(sampler, logits, [Draw(row, 40) for row in range(3)]).tokens.tolist()
    assert mixed == [alone[choice] for choice in order]


def test_uniforms_are_uniform_and_streams_differ():
    keys = [stream_key(seed, choice) for seed in (0, 1, -1, 2**62) for choice in range(4)]
    numbers = uniforms(keys, np.tile(np.arange(2000), (len(keys), 1))).flatten()
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert len(set(numbers.tolist())) == len(numbers)
    histogram, _ = np.histogram(numbers, bins=32, range=(0, 1))
    expected = len(numbers) / 32
    assert ((histogram - expected) ** 2 / expected).sum() < 75  # χ² of 31 degrees: 1 in 20,000
    lag = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(lag) < 0.02


def test_sampled_frequencies_follow_softmax():
    params = SamplingParams(temperature=0.7)
    sampler, _ = make(rows=1)
    sampler.start(init(0, params, seed=3))
    raw = random_logits(1, seed=5)
    count = np.zeros(VOCAB)
    n = 4000
    for position in range(n):
        count[int(draw(sampler, raw, [Draw(0, position)]).tokens[0])] += 1
    expected = torch.softmax(raw[0].double() / 0.7, -1).numpy()
    assert np.abs(count / n - expected).max() < 4 * np.sqrt(0.25 / n)


def test_logprobs_are_those_of_the_raw_logits_whatever_changes_the_draw():
    raw = random_logits(3)
    expected = torch.log_softmax(raw.double(), -1)
    sampler, _ = make()
    sampler.start(init(0, SamplingParams(logit_bias={8: 100.0})))
    sampler.start(init(1, SamplingParams(repetition_penalty=1.5)))
    sampler.start(init(2, SamplingParams()))
    draws = [Draw(0, 3, 2), Draw(1, 3), Draw(2, 3, 5)]
    drawn = draw(sampler, raw.clone(), draws)
    entries = dict(pair for group in drawn.logprobs for pair in group.fetch())
    assert sorted(entries) == [0, 2]
    assert entries[0].token == 8
    for i, n in ((0, 2), (2, 5)):
        assert entries[i].logprob == pytest.approx(float(expected[i, entries[i].token]), abs=1e-5)
        best = torch.sort(expected[i], descending=True)
        assert [t for t, _ in entries[i].top] == best.indices[:n].tolist()
        assert [v for _, v in entries[i].top] == pytest.approx(best.values[:n].tolist(), abs=1e-5)


@given(data=st.data(), rows=st.integers(1, 6))
def test_masks_forbid_and_change_nothing_else(data, rows):
    """Only allowed tokens are drawn, log-probabilities stay those of the raw logits, and rows
    without a mask are drawn as ever.
    """
    allowed = [
        data.draw(st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1)) for _ in range(rows)
    ]
    params = [
        SamplingParams(temperature=data.draw(st.sampled_from([0.0, 1.0])), logit_bias={3: 50.0})
        for _ in range(rows)
    ]

    def run(masks):
        sampler, recorder = make(rows)
        for row in range(rows):
            sampler.start(init(row, params[row], seed=row))
        draws = [Draw(row, 5, logprobs=2, mask=masks[row]) for row in range(rows)]
        drawn = draw(sampler, random_logits(rows), draws)
        return drawn, recorder.logits

    masked, logits = run([None if a is None else packed(a) for a in allowed])
    plain, raw = run([None] * rows)
    for row, ids in enumerate(allowed):
        if ids is None:
            assert masked.tokens[row] == plain.tokens[row]
            assert torch.equal(logits[row], raw[row])
        else:
            assert int(masked.tokens[row]) in ids
            forbidden = sorted(set(range(VOCAB)) - ids)
            assert (logits[row][forbidden] == float("-inf")).all()
            assert torch.equal(logits[row][sorted(ids)], raw[row][sorted(ids)])
    for a, b in zip(masked.logprobs, plain.logprobs, strict=True):
        assert torch.equal(a.values, b.values) and torch.equal(a.top_ids, b.top_ids)


def packed(ids):
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()
