"""Native draws and log-probabilities against plain Python that sorts, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_runtime_cpu import native, sampling
from examples import examples

ISAS = pytest.mark.parametrize("isa", native.runnable())
SEEDS = st.integers(0, 1 << 30)
# Around the sizes of pieces (64), and rows of one and of many parts.
VOCABS = st.one_of(st.integers(1, 140), st.sampled_from([1000, 4097]))


class Unclear(Exception):
    """The answer hangs on rounding."""


def expected(
    row: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    margin: float = 1e-5,
) -> int:
    """The contract word by word. Raises Unclear where a sum is too near to its threshold: kernels
    compute exponentials in float32."""

    def far(a: float, b: float) -> None:
        if abs(a - b) < margin * max(1.0, abs(b)):
            raise Unclear

    falling = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if temperature == 0:
        return falling[0]
    top = row[falling[0]]
    mass = [math.exp((x - top) / temperature) for x in row]
    kept = falling[:top_k] if 0 < top_k < len(row) else falling
    if top_p < 1:
        goal, done, count = top_p * math.fsum(mass[i] for i in kept), 0.0, 0
        for i in kept:
            done, count = done + mass[i], count + 1
            # Sums of exact masses (ties of the largest) may be right at the goal.
            if mass[i] != 1.0 or done != goal:
                far(done, goal)
            if done >= goal:
                break
        kept = kept[: max(count, 1)]
    for i in kept:
        if min_p > 0:
            far(mass[i], min_p)
    kept = sorted(i for i in kept if mass[i] >= min_p)
    goal, done = uniform * math.fsum(mass[i] for i in kept), 0.0
    for i in kept:
        done += mass[i]
        if mass[i] > 0:
            far(done, goal)
        if done > goal:
            return i
    raise Unclear


def a_row(vocab: int, kind: str, scale: float) -> torch.Tensor:
    row = torch.randn(vocab) * scale
    if kind == "ties":
        row = row.round()
    elif kind == "masked":
        row[torch.rand(vocab) < 0.7] = -math.inf
        row[int(torch.randint(vocab, ()))] = 1.0
    elif kind == "flat":
        row = torch.zeros(vocab)
    elif kind == "zeros":
        row = torch.where(torch.rand(vocab) < 0.5, 0.0, -0.0)
    elif kind == "sorted":
        row = torch.sort(row, descending=scale < 4).values
    return row


KINDS = st.sampled_from(["plain", "ties", "masked", "flat", "zeros", "sorted"])


@ISAS
@settings(max_examples=examples(150), deadline=None)
@given(
    vocab=VOCABS,
    kind=KINDS,
    scale=st.sampled_from([0.3, 3.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 3000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-3, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.6, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
    seed=SEEDS,
)
def test_sample(isa, vocab, kind, scale, temperature, top_k, top_p, min_p, uniform, seed):
    torch.manual_seed(seed)
    row = a_row(vocab, kind, scale)
    numbers = torch.tensor([temperature, top_p, min_p])
    temperature, top_p, min_p = numbers.tolist()
    try:
        want = expected(row.tolist(), temperature, top_k, top_p, min_p, uniform)
    except Unclear:
        assume(False)
    logits = torch.full((3, vocab + 5), math.nan)  # strided; the row is not the only one
    logits[:, 2 : vocab + 2] = row
    logits[0, 2 : vocab + 2] = row.flip(0)
    with native.using(isa):
        got = sampling.sample(
            logits[:, 2 : vocab + 2],
            numbers[0].expand(3),
            torch.tensor([top_k] * 3, dtype=torch.int32),
            numbers[1].expand(3),
            numbers[2].expand(3),
            torch.tensor([0.1, uniform, uniform], dtype=torch.float64),
        )
    assert got.dtype == torch.int64 and got[1:].tolist() == [want, want]


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
def test_a_whole_vocabulary(kind):
    """Parts of several pieces; the last piece is a single token."""
    vocab = 262_145
    torch.manual_seed(5)
    row, done = a_row(vocab, kind, 2.0), 0
    values = row.tolist()
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (100, 1.0, 0.0), (0, 0.9, 0.0), (5000, 0.7, 0.01)):
        p = torch.tensor([top_p, min_p])
        try:
            want = expected(values, 1.0, top_k, *p.tolist(), 0.37, margin=3e-7)
        except Unclear:
            continue
        settings = torch.ones(1), torch.tensor([top_k]).int(), p[:1], p[1:]
        draw = torch.tensor([0.37], dtype=torch.float64)
        for isa in native.runnable():
            with native.using(isa):
                assert sampling.sample(row.unsqueeze(0), *settings, draw).item() == want
        done += 1
    assert done >= 3


def greedy(logits: torch.Tensor) -> list[int]:
    rows = logits.shape[0]
    off = torch.zeros(rows)
    result = sampling.sample(logits, off, off.int(), off + 1, off, off.double())
    return result.tolist()


@ISAS
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 2049, 129_280])
def test_the_largest_is_torchs(isa, vocab):
    logits = torch.randn(9, vocab)
    logits[3:6] = logits[3:6].round()  # ties
    logits[6, vocab // 2], logits[7], logits[8] = math.inf, -math.inf, -1.0
    with native.using(isa):
        assert greedy(logits) == logits.argmax(-1).tolist()
        spoilt = logits.clone()
        spoilt[:, vocab // 3] = -math.nan
        assert greedy(spoilt) == [vocab // 3] * 9


@ISAS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fill", ["one", "all"])
def test_what_is_no_number_gives_a_token_that_exists(isa, value, fill):
    logits = torch.randn(16, 300)
    logits[:, 7 if fill == "one" else slice(None)] = value
    torch.manual_seed(1)
    settings = (torch.full((16,), 0.8), torch.tensor([0, 0, 3, 3] * 4).int())
    shares = torch.tensor([1.0] * 8 + [0.5] * 8), torch.tensor([0, 0.1] * 8)
    with native.using(isa):
        got = sampling.sample(logits, *settings, *shares, torch.rand(16, dtype=torch.float64))
    assert ((got >= 0) & (got < 300)).all()
    if value == math.inf and fill == "one":
        assert (got == 7).all()
    if value == -math.inf and fill == "one":
        assert (got != 7).all()


@ISAS
def test_draws_are_as_often_as_their_probabilities(isa):
    """4,000 evenly spaced draws per filter: a token's count is its share, but for the ends."""
    row = torch.randn(200) * 2
    draws = 4000
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    ones = torch.ones(draws)
    for top_k, top_p in ((0, 1.0), (30, 1.0), (0, 0.8), (30, 0.8)):
        share = (row.double() / 0.9).softmax(-1)
        order = share.argsort(descending=True)
        if top_k:
            share[order[top_k:]] = 0
        if top_p < 1:
            share[order[int((share[order] / share.sum()).cumsum(0).lt(top_p).sum()) + 1 :]] = 0
        k = torch.full((draws,), top_k, dtype=torch.int32)
        with native.using(isa):
            got = sampling.sample(
                row.expand(draws, -1), ones * 0.9, k, ones * top_p, ones * 0, uniform
            )
        counts = torch.bincount(got, minlength=200)
        assert ((counts / draws - share / share.sum()).abs() <= 1.01 / draws).all()
        assert (got[1:] >= got[:-1]).all()  # by rising id


@ISAS
@settings(max_examples=examples(60), deadline=None)
@given(rows=st.integers(0, 5), vocab=VOCABS, count=st.integers(1, 3), seed=SEEDS)
def test_masks(isa, rows, vocab, count, seed):
    """Bit for bit, NaN and infinities among the kept; bits from vocab on mean nothing."""
    torch.manual_seed(seed)
    logits = torch.randint(-(1 << 31), 1 << 31, (rows, vocab + 3)).int().view(torch.float32)
    logits = logits[:, 1 : vocab + 1]
    words = -(-vocab // 32) + seed % 3  # wider masks are legal: a grammar's vocabulary is padded
    masks = torch.randint(-(1 << 31), 1 << 31, (count, words)).int()
    which = torch.randint(-1, count, (2 * rows,)).int()[::2]
    with native.using(isa):
        got = sampling.mask_logits(logits, masks, which)
    assert got.is_contiguous() and got.shape == logits.shape
    bits, held = got.view(torch.int32).tolist(), logits.contiguous().view(torch.int32).tolist()
    for r, mask in enumerate(which.tolist()):
        words = masks[mask].tolist()
        for t in range(vocab):
            kept = mask < 0 or words[t // 32] >> t % 32 & 1
            assert bits[r][t] == (held[r][t] if kept else -(1 << 23))  # bits of −inf


@ISAS
@settings(max_examples=examples(120), deadline=None)
@given(
    rows=st.integers(0, 3),
    vocab=VOCABS,
    kind=KINDS,
    scale=st.sampled_from([0.3, 3.0, 1e4]),
    data=st.data(),
    seed=SEEDS,
)
def test_logprobs(isa, rows, vocab, kind, scale, data, seed):
    torch.manual_seed(seed)
    top_n = data.draw(st.sampled_from(sorted({0, 1, min(20, vocab), min(vocab, 3000)})))
    logits = torch.full((rows, vocab + 3), math.nan)
    for row in logits:
        row[1 : vocab + 1] = a_row(vocab, kind, scale)
    logits = logits[:, 1 : vocab + 1]
    ids = torch.randint(vocab, (2 * rows,))[::2]
    with native.using(isa):
        chosen, values, top_ids = sampling.logprobs(logits, ids, top_n)
    want = logits.double().log_softmax(-1)
    near = {"rtol": 1e-6, "atol": 1e-6}
    assert torch.allclose(chosen.double(), want.gather(1, ids.unsqueeze(1)).squeeze(1), **near)
    order = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True).indices[:, :top_n]
    assert torch.equal(top_ids, order)
    assert torch.allclose(values.double(), want.gather(1, order), **near)


@ISAS
def test_logprobs_show_what_is_no_number(isa):
    logits = torch.randn(3, 70)
    logits[0, 4], logits[1, 4], logits[2] = math.nan, math.inf, -math.inf
    with native.using(isa):
        chosen, values, top_ids = sampling.logprobs(logits, torch.tensor([0, 1, 2]), 5)
    assert chosen.isnan().all() and values.isnan().all()
    assert top_ids[:2, 0].tolist() == [4, 4]
    assert all(len(set(row)) == 5 and min(row) >= 0 and max(row) < 70 for row in top_ids.tolist())


@ISAS
def test_rows_do_not_depend_on_threads_or_on_each_other(isa):
    torch.manual_seed(3)
    logits = torch.randn(12, 40_000) * 3
    settings = (
        torch.tensor([0.0, 0.5, 1.0, 1.3] * 3),
        torch.tensor([0, 50, 0] * 4, dtype=torch.int32),
        torch.tensor([1.0, 0.9] * 6),
        torch.tensor([0, 0, 0, 0.01] * 3),
        torch.rand(12, dtype=torch.float64),
    )
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with native.using(isa):
                best = sampling.logprobs(logits, torch.arange(12), 20)
                results.append((sampling.sample(logits, *settings), *best))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    with native.using(isa):
        for r in range(12):
            alone = sampling.sample(logits[r : r + 1], *(s[r : r + 1] for s in settings))
            assert alone.item() == results[0][0][r]
