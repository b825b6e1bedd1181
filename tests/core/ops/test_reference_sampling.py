"""The sampling reference against a slow loop of plain Python floats, and against statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.ops.reference.sampling import logprobs, sample
from examples import examples


def slow_sample(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> tuple[int, float]:
    """(token, how far the draw and the thresholds are from another answer)."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return order[0], 1.0
    weight = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    kept = order[:top_k] if top_k else list(order)
    total, running, nucleus, margin = math.fsum(weight[i] for i in kept), 0.0, [], 1.0
    for i in kept:
        if nucleus and top_p < 1 and running >= top_p * total:
            break
        nucleus.append(i)
        running += weight[i]
        margin = min(margin, abs(running / total - top_p) if top_p < 1 else 1.0)
    if min_p:
        margin = min([margin, *(abs(weight[i] - min_p) for i in nucleus[1:])])
    nucleus = [i for i in nucleus if i == order[0] or weight[i] >= min_p]
    total, running, chosen = math.fsum(weight[i] for i in nucleus), 0.0, None
    for i in sorted(nucleus):  # the draw walks in order of rising id
        running += weight[i]
        if weight[i]:
            margin = min(margin, abs(running / total - uniform))
        if chosen is None and running > uniform * total:
            chosen = i
    return (max(nucleus) if chosen is None else chosen), margin


row = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
        "top_k": st.integers(0, 12),
        "top_p": st.sampled_from([1e-4, 0.3, 0.8, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "uniform": st.floats(0, 1, exclude_max=True),
    }
)
# A coarse grid of logits makes ties common; some tokens are forbidden.
logit = st.one_of(st.integers(-8, 8).map(lambda n: n / 2), st.just(-math.inf))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_sample_equals_a_slow_loop(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 12))
    rows = data.draw(st.lists(row, min_size=1, max_size=4))
    logits = [
        data.draw(st.lists(logit, min_size=vocab, max_size=vocab).filter(lambda x: max(x) > -9))
        for _ in rows
    ]
    got = sample(torch.tensor(logits), *columns(rows)).tolist()
    exactly = sample(torch.tensor(logits, dtype=torch.float64), *columns(rows)).tolist()
    for i, settings_ in enumerate(rows):
        exact = {k: (np.float32(v) if k != "uniform" else v) for k, v in settings_.items()}
        want, margin = slow_sample(
            logits[i], float(exact["temperature"]), settings_["top_k"], float(exact["top_p"]),
            float(exact["min_p"]), settings_["uniform"],
        )  # fmt: skip
        if margin > 1e-9:
            assert exactly[i] == want, (logits[i], settings_)
        if margin > 1e-6:  # float32's rounding of each probability
            assert got[i] == want, (logits[i], settings_)


@settings(max_examples=examples(12), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    step=st.sampled_from([0.01, 0.5, 4.0]),
    top_k=st.sampled_from([0, 300, 4999]),
    top_p=st.sampled_from([0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01]),
)
def test_large_nuclei_with_ties_equal_a_slow_loop(
    seed: int, step: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Nuclei of thousands of tokens, cut inside runs of equal logits."""
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(size=5000) / step) * step
    logits[random.random(5000) < 0.2] = -math.inf
    row_ = torch.tensor(logits)
    draws = [0.0, 1 - 2**-53, *random.random(4).tolist()]
    made = [
        {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p, "uniform": u}
        for u in draws
    ]
    got = sample(row_.repeat(len(draws), 1), *columns(made)).tolist()
    for token, draw in zip(got, draws, strict=True):
        share, floor = float(np.float32(top_p)), float(np.float32(min_p))
        want, margin = slow_sample(row_.tolist(), 1.0, top_k, share, floor, draw)
        if margin > 1e-9:
            assert token == want


def test_the_walk_goes_by_id_and_ties_are_cut_by_id() -> None:
    """Five kept tokens of equal mass: each fifth of [0, 1) is one of them, lowest id first."""
    logits = torch.tensor([0.0, -9.0, 0.0, 0.0, -9.0, 0.0, 0.0, 0.0, 0.0])
    n = 10
    draws = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ones, zeros = torch.ones(n), torch.zeros(n)
    for top_k, top_p in ((5, 1.0), (0, 4.9 / 7), (6, 4.9 / 6)):
        k = torch.full((n,), top_k, dtype=torch.int32)
        got = sample(logits.repeat(n, 1), ones, k, ones * top_p, zeros, draws)
        assert got.tolist() == [0, 0, 2, 2, 3, 3, 5, 5, 6, 6]
    draws = torch.tensor([0.0, 0.2, 0.5], dtype=torch.float64)  # the largest is not the first
    rising = torch.tensor([0.0, 1.0, 2.0]).repeat(3, 1)
    off = torch.zeros(3, dtype=torch.int32)
    assert sample(rising, ones[:3], off, ones[:3], zeros[:3], draws).tolist() == [0, 1, 2]


def fastest(call: Callable[[], object]) -> float:
    """Seconds of the best of several calls, of this thread alone."""
    times = []
    for _ in range(7):
        begin = time.thread_time()
        call()
        times.append(time.thread_time() - begin)
    return min(times)


def test_a_full_vocabulary_is_not_sorted() -> None:
    """At DeepSeek's vocabulary: a row costs a fraction of one sort."""
    logits = torch.randn(1, 129280, generator=torch.Generator().manual_seed(1)) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # thread_time sees no other
    try:
        sort = fastest(lambda: torch.sort(logits.double(), descending=True, stable=True))
        for top_k, top_p in ((0, 1.0), (40, 1.0), (0, 0.9)):
            setting = {
                "temperature": 0.5,
                "top_k": top_k,
                "top_p": top_p,
                "min_p": 0,
                "uniform": 0.7,
            }
            args = columns([setting])
            assert fastest(lambda: sample(logits, *args)) < sort / 3, (top_k, top_p)  # noqa: B023
        ids = torch.tensor([5])
        assert fastest(lambda: logprobs(logits, ids, 20)) < sort / 3
    finally:
        torch.set_num_threads(before)


def test_logprob_ties_at_the_last_place_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(3, 129280)
    logits[0, [129279, 77]] = 1.0
    logits[1] = -math.inf
    logits[1, 500] = 2.0
    logits[2, 3] = math.nan  # shows, and stops nothing
    chosen, values, ids = logprobs(logits, torch.tensor([77, 500, 3]), 5)
    assert ids.tolist() == [[77, 129279, 0, 1, 2], [500, 0, 1, 2, 3], [3, 0, 1, 2, 4]]
    assert values[1].tolist() == [0.0] + [-math.inf] * 4
    assert values[2].isnan().all() and chosen[2].isnan()


def columns(rows: list[dict[str, float]]) -> tuple[torch.Tensor, ...]:
    return (
        torch.tensor([r["temperature"] for r in rows]),
        torch.tensor([r["top_k"] for r in rows], dtype=torch.int32),
        torch.tensor([r["top_p"] for r in rows]),
        torch.tensor([r["min_p"] for r in rows]),
        torch.tensor([r["uniform"] for r in rows], dtype=torch.float64),
    )


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**31), others=st.integers(1, 9), at=st.integers(0, 9))
def test_a_row_gives_the_same_token_alone_and_among_others(seed: int, others: int, at: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, at = others + 1, min(at, others)
    logits = torch.randn(n, 333, generator=generator)
    rest = (
        torch.full((n,), 0.9),
        torch.zeros(n, dtype=torch.int32),
        torch.full((n,), 0.98),
        torch.zeros(n),
        torch.rand(n, generator=generator, dtype=torch.float64),
    )
    together = sample(logits, *rest)
    alone = sample(logits[at : at + 1], *(t[at : at + 1] for t in rest))
    assert together[at] == alone[0]


def test_draws_follow_the_filtered_distribution() -> None:
    """Chi-square of 20000 draws against the softmax over the tokens that min_p keeps."""
    n = 20000
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, -3.0, 0.0, float("-inf")])
    random = np.random.default_rng(7)
    uniform = torch.from_numpy(random.random(n))
    got = sample(
        logits.repeat(n, 1),
        torch.full((n,), 0.8),
        torch.full((n,), 5, dtype=torch.int32),
        torch.ones(n),
        torch.full((n,), 0.06),
        uniform,
    )
    weight = np.exp(np.array([1.0, 0.2, -0.5, 2.0, -3.0, 0.0]) / 0.8)
    keep = weight >= 0.06 * weight.max()
    assert keep.sum() == 4
    expected = np.where(keep, weight, 0) / weight[keep].sum() * n
    counts = np.bincount(got.numpy(), minlength=7)
    assert counts[6] == 0
    assert (counts[:6][~keep] == 0).all()
    chi2 = ((counts[:6] - expected)[keep] ** 2 / expected[keep]).sum()
    assert chi2 < 16.3  # the 0.999 quantile at 3 degrees of freedom


def test_extreme_rows_give_allowed_tokens() -> None:
    logits = torch.tensor([[-math.inf, -1e30, -math.inf], [3e38, -3e38, 0.0], [0.0, 0.0, 0.0]])
    ones, off = torch.ones(3), torch.zeros(3, dtype=torch.int32)
    tokens = sample(
        logits, ones * 1e-3, off, ones, ones * 0, torch.full((3,), 1 - 2**-53, dtype=torch.float64)
    )
    assert tokens.tolist() == [1, 0, 2]


@settings(max_examples=examples(40), deadline=None)
@given(values=st.lists(st.integers(-6, 6), min_size=1, max_size=9), top_n=st.integers(0, 9))
def test_logprobs_equal_a_slow_loop(values: list[int], top_n: int) -> None:
    top_n = min(top_n, len(values))
    total = math.log(math.fsum(math.exp(v) for v in values))
    logits = torch.tensor([values], dtype=torch.float64)
    for token in range(len(values)):
        chosen, best, ids = logprobs(logits, torch.tensor([token]), top_n)
        np.testing.assert_allclose(chosen, [values[token] - total], atol=1e-12)
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:top_n]
        assert ids.tolist() == [order]
        np.testing.assert_allclose(best[0], [values[i] - total for i in order], atol=1e-12)
