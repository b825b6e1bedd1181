"""Native sparse attention where conformance's samples are too small: many slots and rows, scores of
any kind, threads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.ops.reference.attention import scaled
from ds_runtime_cpu import native, prologue, sparse
from examples import examples

FLOATS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38, math.inf, -math.inf, math.nan])


def by_sorting(scores: list[float], k: int) -> list[int]:
    """The k best tokens: NaN above all, zeros equal, of equal ones the first."""
    rank = [math.inf if math.isnan(x) else x for x in scores]
    above = [math.isnan(x) for x in scores]
    order = sorted(range(len(scores)), key=lambda i: (not above[i], -rank[i], i))
    return sorted(order[:k])


@pytest.mark.parametrize("isa", native.runnable())
@settings(max_examples=examples(60), deadline=None)
@given(
    scores=st.lists(st.one_of(FLOATS, st.floats(width=32)), min_size=1, max_size=70),
    k=st.integers(1, 40),
    page=st.integers(1, 9),
)
def test_the_best_are_those_that_sorting_finds(isa, scores, k, page):
    n = len(scores)
    pages = -(-n // page)
    table = torch.arange(pages, dtype=torch.int32).flip(0).view(1, -1) + 3
    one = torch.tensor([n], dtype=torch.int32)
    with native.using(isa):
        found = sparse.index_topk(torch.tensor([scores]), one, one * 0, table, page, k)[0]
    expected = [int(table[0, t // page]) * page + t % page for t in by_sorting(scores, k)]
    assert found.tolist() == expected + [-1] * (k - len(expected))


@pytest.mark.parametrize("isa", native.runnable())
def test_many_slots_and_rows_are_attended_as_in_float64(isa):
    """Ranges of keys are merged, rows come in groups, some rows have no slots at all."""
    torch.manual_seed(5)
    rows, heads, lora, rope, held = 70, 3, 32, 8, 900
    q, cache = torch.randn(rows, heads, lora + rope), torch.randn(held // 4, 4, lora + rope)
    slots = torch.stack([torch.randperm(held)[:700] for _ in range(rows)]).to(torch.int32)
    slots[torch.rand(slots.shape) < 0.2] = -1
    slots[66] = -1
    with native.using(isa):
        found = sparse.sparse_mla(q, cache, slots, lora, 0.2)
    keys = cache.flatten(0, 1).double()[slots.clamp(min=0).long()]
    scores = torch.einsum("rhw,rnw->rhn", q.double(), keys) * 0.2
    weights = scores.masked_fill(slots[:, None] < 0, -math.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(found.double(), weights @ keys[..., :lora], atol=2e-5, rtol=0)
    assert not found[66].any()


@pytest.mark.parametrize("isa", native.runnable())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_tokens_are_written_and_attended(isa, dtype):
    """latent_fp8_groups, bytes as the reference writes them; the latent ends within a group."""
    torch.manual_seed(7)
    rows, heads, lora, rope, held = 5, 3, 320, 10, 900
    latent, key = torch.randn(held, lora).to(dtype), torch.randn(held, rope).to(dtype)
    latent[3, :128], latent[5, 2] = 0.0, 700.0
    caches = torch.full((2, 60, 15, scaled.token_bytes(lora, rope)), 7, dtype=torch.uint8)
    where = torch.randperm(held)
    where[::50] = -1
    slots = torch.stack([torch.randperm(held)[:700] for _ in range(rows)]).to(torch.int32)
    slots[torch.rand(slots.shape) < 0.2] = -1
    held_ones = torch.zeros(held, dtype=torch.bool).index_fill_(0, where[where >= 0], True)
    slots[~held_ones[slots.clamp(min=0).long()]] = -1  # of the others' bytes nothing is known
    q = torch.randn(rows, heads, lora + rope).to(dtype)
    with native.using(isa):
        prologue.scaled_cache_write(caches[0], latent, key, where)
        found = sparse.scaled_sparse_mla(q, caches[0], slots, lora, 0.05)
    scaled.scaled_cache_write(caches[1], latent, key, where)
    assert torch.equal(caches[0], caches[1])
    keys = scaled.decoded(caches[1].flatten(0, 1)[slots.clamp(min=0).long()], lora).double()
    scores = torch.einsum("rhw,rnw->rhn", q.double(), keys) * 0.05
    weights = scores.masked_fill(slots[:, None] < 0, -math.inf).softmax(-1)
    atol, rtol = (
        (2e-5, 1e-6) if dtype == torch.float32 else (4e-3, 2**-8)
    )  # half a unit of bfloat16
    torch.testing.assert_close(found.double(), weights @ keys[..., :lora], atol=atol, rtol=rtol)


@pytest.mark.parametrize("isa", native.runnable())
@pytest.mark.parametrize("heads", [5, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_depend_on_no_other_row_and_on_no_thread(dtype, heads, isa):
    torch.manual_seed(6)
    d, page = 64, 16
    lens = torch.tensor([3000] * 3 + [1100, 40, 1], dtype=torch.int32)
    owners = torch.tensor([0, 0, 0, 1, 2, 3], dtype=torch.int32)
    cache = torch.randn(4 * 188, page, d).to(dtype)
    table = torch.randperm(4 * 188).to(torch.int32).view(4, 188)
    q, weights = torch.randn(6, heads, d).to(dtype), torch.randn(6, heads)

    def scored(some):
        mine = owners[some], lens[some]
        with native.using(isa):
            return sparse.index_scores(q[some], weights[some], cache, table, *mine)

    whole = scored(slice(6))
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for r in range(6):
                alone = scored(slice(r, r + 1))
                assert torch.equal(alone[0, : lens[r]], whole[r, : lens[r]]), (r, threads)
    finally:
        torch.set_num_threads(1)
