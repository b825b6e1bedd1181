"""Native sparse attention where conformance's samples are too small: many slots and rows, scores of
any kind, threads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.ops.reference.attention import index, scaled
from ds_runtime_cpu import kernels, native, prologue, sparse
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import facts_for
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


@pytest.mark.parametrize("isa", native.runnable())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from([0.0, -0.0, 0.25, 0.75, 2.5, 5.0, 6.0]), st.floats(-1e30, 1e30)),
        min_size=1,
        max_size=96,
    ),
    st.sampled_from([1.0, 2.0**-130, 1e-30, 1e5]),
)
def test_keys_in_fp4_have_the_bytes_of_the_reference(isa, dtype, values, scale):
    """Ties, zeros, numbers too small for a scale of their own; nothing is rotated or mixed."""
    d, table = 96, torch.tensor([[1.0, 0.0]])
    row = (torch.tensor((values * d)[:d], dtype=torch.float64) * scale).to(dtype)
    q, k = torch.stack((row, -row.flip(0))).view(1, 2, d), row.view(1, d)
    caches, where = torch.full((2, 1, 4, d // 2 + d // 32), 7, dtype=torch.int8), torch.tensor([2])
    at = torch.tensor([0]), table, False
    want, _ = index.index_encode(q, k, *at, caches[1], where)
    with native.using(isa):
        got, made = sparse.index_encode(q, k, *at, caches[0], where)
    assert torch.equal(caches[0], caches[1])
    assert got.dtype == dtype and torch.equal(got, want) and torch.equal(made, torch.ones(1, 2))


@pytest.mark.parametrize("isa", native.runnable())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_fp4_keys_are_those_of_what_the_bytes_stand_for(isa, dtype):
    torch.manual_seed(8)
    d, heads, page, seen = 128, 64, 16, 1100
    keys = torch.randn(seen // page + 1, page, d) * torch.logspace(-8, 8, page)[:, None]
    cache, table = index.pack_fp4(keys), torch.arange(len(keys), dtype=torch.int32).view(1, -1)
    q, weights = torch.randn(2, heads, d).to(dtype), torch.randn(2, heads)
    lens, owners = torch.tensor([seen, 3], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with native.using(isa):
        found = sparse.index_scores(q, weights, cache, table, owners, lens)
    held = index.read_fp4(cache).flatten(0, 1).double()
    dots = torch.relu(torch.einsum("rhd,td->rht", q.double(), held))
    want = torch.einsum("rht,rh->rt", dots, weights.double())
    size = torch.einsum("rht,rh->rt", dots, weights.double().abs()).clamp(min=1e-30)
    for r, n in enumerate(lens.tolist()):
        assert ((found[r, :n] - want[r, :n]).abs() / size[r, :n]).max() < 1e-5


def test_who_refuses_keys_in_fp4_says_which_flag_brought_them():
    """Another remedy than that for other dtypes of keys."""
    (prologue,) = (k for k in kernels.OFFERS if k.op.name == "index_prologue")
    facts = facts_for(CpuPlatform().info(), "bfloat16", kv_dtype="float4_e2m1fn_x2")
    said = str(prologue.refuse(facts))
    assert said.endswith(": leave --trained-rounding out") and "float4" in said
    said = str(prologue.refuse(replace(facts, index_dtype="float16")))
    assert said.endswith(": pass --index-cache-dtype auto")
