"""Attention references against a loop in numpy float64, and against each other where maths says
that they must agree: decode equals prefill, chunks merged equal the whole."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.ops.batch import Limits
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.ops.reference.attention.cache import (
    allocate_latent_pages,
    cache_gather,
    cache_write,
)
from ds_runtime.ops.reference.attention.dense import (
    ReferenceMlaAbsorb,
    ReferenceMlaDecode,
    decode_batch,
    merge_state,
    mha_prefill,
    tree_bits,
)
from ds_runtime.ops.reference.cases import Maker, segments
from examples import examples

DIMS = Dims({"heads": 3, "qk_nope": 6, "qk_rope": 4, "v": 5, "kv_lora": 7})
FACTS = Facts(DeviceInfo("cpu", "", ""), DIMS, dtype="float64", kv_dtype="float64", page_size=4)
lengths = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=4)


def attend_one(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> tuple:
    """One query, one head, scalar by scalar."""
    if not len(keys):
        return np.zeros(values.shape[1]), -math.inf
    scores = [scale * sum(float(a) * float(b) for a, b in zip(q, k, strict=True)) for k in keys]
    weights = [math.exp(s) for s in scores]
    total = math.fsum(weights)
    out = sum(w / total * v for w, v in zip(weights, values, strict=True))
    return out, math.log(total)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**31), lens=lengths, causal=st.booleans())
def test_mha_prefill_equals_a_scalar_loop(
    seed: int, lens: list[tuple[int, int]], causal: bool
) -> None:
    heads, d, rope, dv, scale = 2, 3, 2, 3, 0.7
    q_segs, k_segs = segments(*(a for a, _ in lens)), segments(*(b for _, b in lens))
    random = np.random.default_rng(seed)
    q = random.normal(size=(q_segs.total, heads, d + rope))
    k = random.normal(size=(k_segs.total, heads, d + rope))
    k[:, :, d:] = k[:, :1, d:]  # all heads share it
    v = random.normal(size=(k_segs.total, heads, dv))
    parts = (q[:, :, :d], q[:, :, d:], k[:, :, :d], k[:, 0, d:], v)
    tensors = (torch.from_numpy(t) for t in parts)
    out, lse = mha_prefill(*tensors, q_segs, k_segs, causal, scale)
    q0 = k0 = 0
    for queries, keys in lens:
        for j in range(queries):
            seen = min(keys, max(0, j + keys - queries + 1)) if causal else keys
            for h in range(heads):
                rows = slice(k0, k0 + seen)
                want, sums = attend_one(q[q0 + j, h], k[rows, h], v[rows, h], scale)
                np.testing.assert_allclose(out[q0 + j, h], want, rtol=1e-9, atol=1e-12)
                np.testing.assert_allclose(lse[q0 + j, h], sums, rtol=1e-9, atol=1e-12)
        q0, k0 = q0 + queries, k0 + keys


def test_mha_prefill_in_head_groups_equals_all_heads_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, q_rope, k, v = (torch.randn(7, 5, n, dtype=torch.float64) for n in (4, 2, 4, 4))
    segs = segments(3, 4)
    call = (q, q_rope, k, torch.randn(7, 2, dtype=torch.float64), v, segs, segs, True, 0.4)
    whole = mha_prefill(*call)
    monkeypatch.setattr("ds_runtime.ops.reference.attention.dense._SCORE_ELEMENTS", 32)
    for a, b in zip(whole, mha_prefill(*call), strict=True):
        torch.testing.assert_close(a, b)


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**31), keys=st.integers(1, 12), cut=st.integers(0, 12))
def test_parts_merged_equal_the_whole(seed: int, keys: int, cut: int) -> None:
    cut = min(cut, keys)
    generator = torch.Generator().manual_seed(seed)
    q, q_rope, *keyed = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 2, 4), (3, 2, 2), (keys, 2, 4), (keys, 2), (keys, 2, 4))
    )
    q_segs = segments(3)
    want = mha_prefill(q, q_rope, *keyed, q_segs, segments(keys), False, 0.5)
    first, rest = (t[:cut] for t in keyed), (t[cut:] for t in keyed)
    a = mha_prefill(q, q_rope, *first, q_segs, segments(cut), False, 0.5)
    b = mha_prefill(q, q_rope, *rest, q_segs, segments(keys - cut), False, 0.5)
    for got, whole in zip(merge_state(*a, *b), want, strict=True):
        torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-12)


def test_merging_two_empty_parts_gives_nothing_and_no_nan() -> None:
    zero, nothing = torch.zeros(2, 3, 4), torch.full((2, 3), float("-inf"))
    out, lse = merge_state(zero, nothing, zero, nothing)
    assert out.eq(0).all()
    assert lse.eq(float("-inf")).all()


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**31), lens=st.lists(st.integers(1, 14), max_size=4))
def test_absorbed_paged_decode_equals_plain_attention_over_expanded_heads(
    seed: int, lens: list[int]
) -> None:
    """The identity that absorption rests on, with shuffled pages and NaN around them."""
    make = Maker(FACTS, str(seed))
    heads, nope, rope, v, kv_lora = (
        DIMS[n] for n in ("heads", "qk_nope", "qk_rope", "v", "kv_lora")
    )
    weight = make.weight(heads * (nope + v), kv_lora, dtype=torch.float64)
    absorb, decode = ReferenceMlaAbsorb(FACTS), ReferenceMlaDecode(FACTS)
    packed = absorb.pack(weight, FACTS)
    paged, table = make.paged(tuple(lens))
    cache = paged.rows.view(-1, FACTS.page_size, kv_lora + rope)
    q = make.normal(len(lens), heads, nope + rope)
    scale = 0.3

    state = decode.state(Limits(16, 8, 8, FACTS.page_size, heads, "cpu"))
    decode.prepare(state, decode_batch(tuple(lens), table))
    absorbed = absorb.apply_q(q[..., :nope], q[..., nope:], packed)
    got = absorb.apply_v(decode.run(state, absorbed, cache, scale), packed)

    segs = segments(*lens)
    starts = torch.zeros(len(lens), dtype=torch.int64)
    latent, k_rope = cache_gather(cache, table, starts, segs, kv_lora, torch.float64)
    k_nope, values = absorb.expand(latent, packed)
    ones = segments(*[1] * len(lens))
    parts = (q[..., :nope], q[..., nope:], k_nope, k_rope, values)
    want, _ = mha_prefill(*parts, ones, segs, True, scale)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_a_row_of_a_tree_sees_its_line_alone(data: st.DataObject) -> None:
    """As a sequence of the tokens before the tree and of the row's ancestors, and nothing else."""
    count = data.draw(st.integers(1, 9))
    parents = [data.draw(st.integers(0, node - 1)) for node in range(1, count)]
    before = data.draw(st.integers(0, 80))
    make, heads, width = Maker(FACTS, f"{before}{parents}"), DIMS["heads"], 11
    paged, table = make.paged((before + count,))
    cache = paged.rows.view(-1, FACTS.page_size, width)
    q = make.normal(count, heads, width)
    decode = ReferenceMlaDecode(FACTS)
    state = decode.state(Limits(16, 1, 32, FACTS.page_size, heads, "cpu", 9))
    step = decode_batch((before + count,), table, (count,))
    step.decode = replace(step.decode, tree=tree_bits(parents))
    decode.prepare(state, step)
    got = decode.run(state, q, cache, 0.3)

    whole = segments(before + count)
    latent, k_rope = cache_gather(cache, table, torch.tensor([0]), whole, 7, torch.float64)
    keys = torch.cat((latent, k_rope), -1)
    for node in range(count):
        line, above = [node], node
        while above:
            above = parents[above - 1]
            line.append(above)
        seen = keys[[*range(before), *sorted(before + n for n in line)]]
        for head in range(heads):
            want, _ = attend_one(q[node, head].numpy(), seen.numpy(), seen[:, :7].numpy(), 0.3)
            np.testing.assert_allclose(got[node, head].numpy(), want, rtol=1e-9, atol=1e-10)


def test_expand_splits_each_head_into_nope_then_v() -> None:
    heads, nope, v, kv_lora = 3, 6, 5, 7
    absorb = ReferenceMlaAbsorb(FACTS)
    weight = Maker(FACTS, "split").weight(heads * (nope + v), kv_lora, dtype=torch.float64)
    packed = absorb.pack(weight, FACTS)
    rows = weight.parts[0].tensors["weight"].numpy()
    latent = np.arange(kv_lora, dtype=np.float64)
    k_nope, values = absorb.expand(torch.from_numpy(latent)[None], packed)
    for h in range(heads):
        first = h * (nope + v)
        np.testing.assert_allclose(k_nope[0, h], rows[first : first + nope] @ latent)
        np.testing.assert_allclose(values[0, h], rows[first + nope : first + nope + v] @ latent)


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_what_is_written_is_gathered(data: st.DataObject) -> None:
    cache = allocate_latent_pages(6, FACTS, "cpu").fill_(float("nan"))
    pages = data.draw(st.permutations(range(6)))
    n = data.draw(st.integers(0, 12))
    start = data.draw(st.integers(0, n))
    count = data.draw(st.integers(0, n - start))
    rows = torch.randn(n, 11, dtype=torch.float64)
    slots = torch.tensor([pages[t // 4] * 4 + t % 4 for t in range(n)], dtype=torch.int64)
    order = torch.tensor(data.draw(st.permutations(range(n))), dtype=torch.int64)
    cache_write(cache, rows[order, :7], rows[order, 7:], slots[order])
    table = torch.tensor([pages], dtype=torch.int32)
    latent, k_rope = cache_gather(
        cache, table, torch.tensor([start]), segments(count), 7, torch.float64
    )
    assert torch.equal(torch.cat((latent, k_rope), -1), rows[start : start + count])
    assert int(cache.isnan().any(-1).sum()) == 24 - n
