"""Native attention over a window, its compressed entries, streams, choices by the root of softplus.

Every instruction set that runs here, against the references in float64; bits depend on no thread.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_runtime.ops.contract import Routing
from ds_runtime.ops.reference import streams as wide_streams
from ds_runtime.ops.reference.attention import window as wide_window
from ds_runtime.ops.reference.matrices import limited
from ds_runtime_cpu import native, routing, streams, window
from examples import examples

every_isa = pytest.mark.parametrize("isa", native.runnable())
fuzz = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def attention(tokens: int, heads: int, d: int, n: int, held: bool, most: int, generator):
    """Arguments of window_sparse: one sequence's tokens, then one of padding."""
    first, entries, width = most, most + tokens, most
    q = torch.randn(tokens, heads, d, generator=generator)
    kv = None if held else torch.randn(tokens, d, generator=generator)
    recent = torch.randn(2, entries, d, generator=generator)
    positions = torch.arange(first, first + tokens)
    blocks = torch.ones(tokens, dtype=torch.int64)
    blocks[tokens - 1 :] = -1
    compressed = torch.randn(3, 8, d, generator=generator)
    slots = torch.stack([torch.randperm(24, generator=generator)[:n] for _ in range(tokens)])
    slots[torch.rand(tokens, n, generator=generator) < 0.3] = -1
    sink = torch.randn(heads, generator=generator) * 20
    where = recent, positions, blocks, width, compressed, slots.int()
    return q, sink, kv, *where, d**-0.5


def doubled(args):
    return [
        a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
    ]


@every_isa
@fuzz
@given(st.data())
def test_attention(isa, data):
    """Sinks that are most of the denominator, or nothing of it; few keys and many."""
    draw = data.draw
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = draw(st.integers(1, 70)), draw(st.integers(1, 5)), 2 * draw(st.integers(1, 40))
    more = draw(st.integers(0, 24)), draw(st.booleans()), draw(st.sampled_from([1, 3, 64, 200]))
    args = attention(*sizes, *more, seed)
    with native.using(isa):
        got, lse = window.window_sparse(*args)
    want, total = wide_window.window_sparse(*doubled(args))
    torch.testing.assert_close(got.double(), want, **CLOSE)
    torch.testing.assert_close(lse.double(), total, **CLOSE)


@every_isa
@pytest.mark.parametrize("tokens", [1, 5, 65])
def test_bits_depend_on_no_thread_and_no_other_token(isa, tokens):
    seed = torch.Generator().manual_seed(tokens)
    q, sink, kv, recent, positions, blocks, *rest = attention(tokens, 16, 128, 24, True, 600, seed)
    blocks = blocks.abs()
    q, recent, rest[1] = q.bfloat16(), recent.bfloat16(), rest[1].bfloat16()
    x, fn = torch.randn(tokens, 4, 1000).bfloat16(), torch.randn(24, 4000)
    weights = torch.randn(24), torch.randn(3), 1e-6, 1e-6, 20
    before, found = torch.get_num_threads(), []
    with native.using(isa):
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                one = window.window_sparse(q, sink, kv, recent, positions, blocks, *rest)
                found.append((*one, *streams.hc_pre(x, fn, *weights)))
        finally:
            torch.set_num_threads(before)
        where = positions[-1:], blocks[-1:], rest[0], rest[1], rest[2][-1:], rest[3]
        alone = window.window_sparse(q[-1:], sink, None, recent, *where)
        alone = (*alone, *streams.hc_pre(x[-1:], fn, *weights))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert all(torch.equal(a[-1:], b) for a, b in zip(found[0], alone, strict=True))


@every_isa
@fuzz
@given(st.data())
def test_streams(isa, data):
    draw = data.draw
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens, n, d = draw(st.integers(0, 9)), draw(st.integers(1, 8)), draw(st.integers(1, 300))
    x = torch.randn(tokens, n, d, generator=seed) * draw(st.sampled_from([1e-3, 1.0, 100.0]))
    rows = n * (2 + n)
    fn = torch.randn(rows, n * d, generator=seed) * (n * d) ** -0.5
    base, scale = torch.randn(rows, generator=seed), torch.randn(3, generator=seed)
    rest = 1e-6, draw(st.sampled_from([1e-6, 1e-2])), draw(st.integers(1, 20))
    y = torch.randn(tokens, d + 3, generator=seed)[:, 1 : d + 1]
    with native.using(isa):
        got = streams.hc_pre(x, fn, base, scale, *rest)
        back = streams.hc_post(y, x, *got[1:])
        one = streams.hc_head(x, fn[:n], base[:n], scale[:1], *rest[:2])
    want = wide_streams.hc_pre(*doubled((x, fn, base, scale)), *rest)
    size = max(1.0, float(x.abs().max())) if x.numel() else 1.0
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5 * size)
    mixed = wide_streams.hc_post(*doubled((y, x, *got[1:])))
    torch.testing.assert_close(back.double(), mixed, rtol=1e-5, atol=1e-5 * size)
    head = wide_streams.hc_head(*doubled((x, fn[:n], base[:n], scale[:1])), *rest[:2])
    torch.testing.assert_close(one.double(), head, rtol=1e-4, atol=2e-5 * size)


@every_isa
def test_choices_of_many_experts_and_scores_of_every_size(isa):
    logits = torch.linspace(-100, 100, 5 * 384).view(384, 5).T
    route = Routing(8, 384, 1, 1, "sqrtsoftplus", "noaux_tc", True, 2.5)
    given_ids = torch.stack([torch.randperm(384)[:8] for _ in range(5)])
    with native.using(isa):
        for chosen in (None, given_ids):
            weights, ids = routing.route_softplus(logits, None, chosen, route)
            want, theirs = limited.route_softplus(logits, None, chosen, route)
            assert torch.equal(ids.sort(1).values, theirs.sort(1).values)
            if chosen is not None:
                torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)
            assert weights.sum(1) == pytest.approx([2.5] * 5, rel=1e-5)


def windows(draw, dtype=torch.float32):
    """Arguments of compress_windows, for two sequences from any position on and some padding."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ratio, overlap = draw(st.sampled_from([1, 2, 4, 7, 128])), draw(st.booleans())
    half, counts = draw(st.integers(1, 40)), draw(st.lists(st.integers(0, 300), max_size=2))
    d, spans = 2 * half, [(draw(st.integers(0, 300)), count) for count in counts]
    width, padding = d * (1 + overlap), draw(st.integers(0, 3))
    positions = [p for first, count in spans for p in range(first, first + count)] + [0] * padding
    blocks = [2 - i for i, (_, count) in enumerate(spans) for _ in range(count)] + [-1] * padding
    rows = torch.randn(len(positions), 2 * width + 3, generator=seed)[:, 1 : 2 * width + 1]
    rows = (rows * draw(st.sampled_from([1.0, 30.0]))).to(dtype)
    entries = ratio * (1 + overlap) - 1 + draw(st.integers(0, 3)) or 1
    state = torch.randn(3, entries, 2 * width, generator=seed)
    weights = torch.randn(ratio, width, generator=seed), torch.randn(d, generator=seed)
    turned = 2 * draw(st.integers(1, half))
    angles = torch.rand(700, turned // 2, generator=seed) * 7
    table = torch.cat((angles.cos(), angles.sin()), 1)
    at = torch.tensor(positions, dtype=torch.int64), torch.tensor(blocks, dtype=torch.int64)
    return [rows, *weights, 1e-6, at[0], table, 0, state, at[1]]


@every_isa
@fuzz
@given(st.data())
def test_entries(isa, data):
    """Windows that close within a call, across calls and in front of position 0."""
    args = windows(data.draw)
    wide = doubled(args)
    want = wide_window.compress_windows(*wide)
    with native.using(isa):
        got = window.compress_windows(*args)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(args[7].double(), wide[7], rtol=1e-6, atol=1e-5)


@every_isa
@fuzz
@given(st.data())
def test_bits_of_entries_depend_on_no_chunk_and_no_thread(isa, data):
    """A call of all rows, and calls of a few each, by other threads."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    args = windows(data.draw, dtype)
    args[6] = data.draw(st.sampled_from([0, 16]))
    rows, positions, state, blocks = args[0], args[4], args[7], args[8]
    step, threads = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    before, other = torch.get_num_threads(), state.clone()
    with native.using(isa):
        whole = window.compress_windows(*args)
        made = [whole[:0]]
        try:
            torch.set_num_threads(threads)
            for i in range(0, len(rows), step):
                some = slice(i, i + step)
                part = rows[some], *args[1:4], positions[some], *args[5:7], other, blocks[some]
                made.append(window.compress_windows(*part))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(torch.cat(made), whole)
    assert torch.equal(other, state)
