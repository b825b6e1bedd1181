"""Rope, norm, activation and embedding references against formulas that are not ours."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

from ds_runtime.ops.reference.activation import silu_mul
from ds_runtime.ops.reference.attention.rope import rope
from ds_runtime.ops.reference.matrices.linear import embed
from ds_runtime.ops.reference.norm import add_rms_norm, rms_norm
from examples import examples

seeds = st.integers(0, 2**31)


def angles(positions: int, d: int) -> torch.Tensor:
    frequency = 1.0 / 10000 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    return torch.outer(torch.arange(positions, dtype=torch.float64), frequency)


@settings(max_examples=examples(30), deadline=None)
@given(seed=seeds, tokens=st.integers(1, 9), heads=st.integers(1, 4), half=st.integers(1, 32))
def test_rope_equals_both_forms_of_transformers(
    seed: int, tokens: int, heads: int, half: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, 2 * half, generator=generator, dtype=torch.float64)
    k = torch.randn(tokens, 2 * half, generator=generator, dtype=torch.float64)
    positions = torch.randint(0, 300, (tokens,), generator=generator)
    angle = angles(300, 2 * half)
    ours_q, ours_k = rope(q, k, positions, torch.cat((angle.cos(), angle.sin()), -1))

    # V3's keeps halves apart in its result, so only dot products agree.
    chosen = angle[positions].repeat(1, 2)
    theirs_q, theirs_k = apply_rotary_pos_emb_interleave(
        q.transpose(0, 1)[None], k[None, None], chosen.cos()[None], chosen.sin()[None]
    )
    ours = torch.einsum("qhd,kd->hqk", ours_q, ours_k)
    theirs = theirs_q[0] @ theirs_k[0].transpose(-1, -2)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    # V2's multiplies complex numbers (in float32), pair by pair as the contract stores them.
    turn = torch.polar(torch.ones_like(angle[positions]), angle[positions])[None]
    by_q, by_k = apply_rotary_emb(q.transpose(0, 1)[None], k[None, None], turn)
    torch.testing.assert_close(ours_q, by_q[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_k, by_k[0, 0], rtol=1e-5, atol=1e-5)


def test_rope_turns_the_pair_one_zero_to_cos_sin() -> None:
    angle = angles(8, 2)
    table = torch.cat((angle.cos(), angle.sin()), -1)
    k = torch.tensor([[1.0, 0.0]] * 8, dtype=torch.float64)
    _, turned = rope(k[:, None], k, torch.arange(8), table)
    np.testing.assert_allclose(turned[:, 0], np.cos(np.arange(8)))
    np.testing.assert_allclose(turned[:, 1], np.sin(np.arange(8)))


@settings(max_examples=examples(30), deadline=None)
@given(seed=seeds, tokens=st.integers(0, 5), hidden=st.integers(1, 300))
def test_rms_norm_equals_numpy_row_by_row(seed: int, tokens: int, hidden: int) -> None:
    random = np.random.default_rng(seed)
    x, weight = random.normal(size=(tokens, hidden)), random.normal(size=hidden)
    want = [row * weight / np.sqrt(np.dot(row, row) / hidden + 1e-6) for row in x]
    got = rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-6)
    np.testing.assert_allclose(got, np.array(want).reshape(tokens, hidden), rtol=1e-12, atol=1e-12)
    low = rms_norm(torch.from_numpy(x).bfloat16(), torch.from_numpy(weight).float(), 1e-6)
    assert low.dtype == torch.bfloat16


def test_add_rms_norm_returns_the_stream_and_its_norm() -> None:
    x, residual = torch.randn(3, 8).double(), torch.randn(3, 8).double()
    normed, summed = add_rms_norm(x, residual, torch.full((8,), 2.0).double(), 0.0)
    np.testing.assert_allclose(summed, x.numpy() + residual.numpy())
    np.testing.assert_allclose(normed.square().sum(-1), np.full(3, 32.0))  # Σ (2 x / rms)² = 4 n


@settings(max_examples=examples(20), deadline=None)
@given(seed=seeds, tokens=st.integers(0, 4), n=st.integers(1, 70))
def test_silu_mul_equals_the_logistic_function(seed: int, tokens: int, n: int) -> None:
    x = np.random.default_rng(seed).normal(size=(tokens, 2 * n)) * 5
    gate, up = x[:, :n], x[:, n:]
    np.testing.assert_allclose(
        silu_mul(torch.from_numpy(x)), gate / (1 + np.exp(-gate)) * up, rtol=1e-12
    )


@settings(max_examples=examples(40), deadline=None)
@given(ids=st.lists(st.integers(0, 60), max_size=12), start=st.integers(0, 40))
def test_embed_gives_zero_rows_outside_the_shard(ids: list[int], start: int) -> None:
    table = torch.randn(20, 3)
    got = embed(torch.tensor(ids, dtype=torch.int64), table, start)
    want = [table[i - start].tolist() if start <= i < start + 20 else [0.0] * 3 for i in ids]
    assert got.tolist() == want
