"""The CUDA plugin's own attention of prompts on a GPU: ragged, prefixed, many, and strided."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_runtime.ops.batch import Segments
from ds_runtime_cuda.attention import mha_prefill, mha_prefill_quantize
from ds_runtime_cuda.quant import quantise

pytestmark = pytest.mark.gpu
SCALE = 0.07
LENGTHS = (  # of queries, of keys, causal
    ((5,), (5,), True),
    ((128,), (128,), True),
    ((300, 1, 129, 17), (300, 1, 129, 17), True),
    ((3, 200), (500, 777), True),
    ((3, 200), (500, 777), False),
    ((0, 4, 0), (3, 4, 0), True),
    ((6, 2), (2, 1), True),  # rows without keys
    ((150, 3, 2), (0, 130, 5), False),
    ((1,) * 700, (3,) * 700, True),  # more than a launch takes
    ((2048, 512), (2048, 512), True),
)


def segments(lens: tuple[int, ...]) -> Segments:
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device="cuda")
    return Segments(lens, cu)


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, q_rope, k, k_rope, v


def inputs(heads: int, queries, keys) -> Parts:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, both = normal(sum(queries), heads, 192), normal(sum(keys), heads, 256)
    q_rope, k_rope = normal(sum(queries), heads, 64), normal(sum(keys), 64)
    return q[..., :128], q_rope, both[..., :128], k_rope, both[..., 128:]


def expected(parts: Parts, queries, keys, causal) -> tuple[Tensor, Tensor]:
    """In float64, sequence by sequence."""
    q, q_rope, k, k_rope, v = (x.double() for x in parts)
    heads, outs, sums = q.shape[1], [], []
    q = torch.cat((q, q_rope), -1).transpose(0, 1)
    k = torch.cat((k, k_rope[:, None].expand(-1, heads, -1)), -1).transpose(0, 1)
    for at, seen in zip(
        q.split(queries, 1), zip(k.split(keys, 1), v.split(keys), strict=True), strict=True
    ):
        scores = at @ seen[0].transpose(1, 2) * SCALE
        if causal:
            rows, columns = (torch.arange(n, device="cuda") for n in scores.shape[1:])
            hidden = columns > rows[:, None] + (len(columns) - len(rows))
            scores = scores.masked_fill(hidden, float("-inf"))
        total = scores.logsumexp(-1)
        weights = (scores - total[..., None]).exp().nan_to_num(0.0)
        outs.append((weights @ seen[1].transpose(0, 1)).transpose(0, 1))
        sums.append(total.T)
    return torch.cat(outs), torch.cat(sums)


@pytest.mark.parametrize("heads", [1, 3, 16, 128])
@pytest.mark.parametrize(("queries", "keys", "causal"), LENGTHS)
def test_ragged(queries, keys, causal, heads):
    torch.manual_seed(0)
    parts = inputs(heads, queries, keys)
    out, lse = mha_prefill(*parts, segments(queries), segments(keys), causal, SCALE)
    want, total = expected(parts, queries, keys, causal)
    assert (out.double() - want).abs().max() < 0.02
    assert torch.equal(lse.isinf(), total.isinf())
    assert (lse.double() - total)[total.isfinite()].abs().max() < 1e-4
    for _ in range(3):
        again = mha_prefill(*parts, segments(queries), segments(keys), causal, SCALE)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def test_no_sequence_sees_another_ones_values():
    lens = (100, 60, 128)
    parts = inputs(4, lens, lens)
    parts[4][100:160] = float("nan")
    out, _ = mha_prefill(*parts, segments(lens), segments(lens), True, SCALE)
    assert out[:100].isfinite().all() and out[160:].isfinite().all() and out[100:160].isnan().all()


def test_what_the_copy_engine_cannot_read_is_copied():
    lens = (70, 200)
    parts = inputs(3, lens, lens)
    out, lse = mha_prefill(*parts, segments(lens), segments(lens), True, SCALE)

    def elsewhere(x: Tensor) -> Tensor:  # rows of an odd number of values, at an odd place
        wide = torch.zeros(x.shape[0], x[0].numel() + 5, device="cuda", dtype=x.dtype)
        wide[:, 3:-2] = x.reshape(x.shape[0], -1)
        return wide[:, 3:-2].unflatten(1, x.shape[1:])

    def turned(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    for change in (elsewhere, turned):
        q, q_rope, k, k_rope, v = (change(x) for x in parts)
        again = mha_prefill(q, q_rope, k, k_rope, v, segments(lens), segments(lens), True, SCALE)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("lens", [(1,), (300, 1, 129, 17), (0, 4, 0), (3,) * 700, (2048, 512)])
def test_codes_are_those_of_what_attention_gives(lens, heads, powers):
    torch.manual_seed(0)
    parts, segs = inputs(heads, lens, lens), segments(lens)
    parts[4][:1] *= 100
    out, _ = mha_prefill(*parts, segs, segs, True, SCALE)
    values, sizes = quantise(out.flatten(1), powers=powers)
    for _ in range(3):
        codes, scale = mha_prefill_quantize(*parts, segs, SCALE, 128, powers)
        assert torch.equal(scale, sizes)
        assert torch.equal(codes.view(torch.uint8), values.view(torch.uint8))
