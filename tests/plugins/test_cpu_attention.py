"""Native attention, one instruction set after the other, against torch in float64.

Whatever a kernel has no business with is NaN: rows behind a sequence, pages of nobody, columns
beside a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_runtime.ops.batch import Batch, DecodePart, Limits, Segments
from ds_runtime.ops.contract import Dims
from ds_runtime_cpu import attention, native
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import facts_for
from examples import examples

NAN = float("nan")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 6e-3}
KINDS = [(d, c) for d in TOLERANCE for c in (d, torch.float8_e4m3fn)]
BLOCKS = (96, 128, 192)  # KEYS of csrc/words.h, with BF16 dots and without; the shortest range
EDGES = [1, 2, 15, 16, 17, *(n * b + i for n in (1, 3, 6) for b in BLOCKS for i in (-1, 0, 1))]

lengths = st.sampled_from(EDGES) | st.integers(1, 700)
every_isa = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(params=native.runnable())
def isa(request):
    """Every variant that was built and runs here, not only the best."""
    with native.using(request.param):
        yield request.param


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= TOLERANCE[got.dtype], float(error)


def inside(values: Tensor) -> Tensor:
    """The same values as a slice of a wider tensor of NaN, at an odd offset."""
    outer = torch.full((*values.shape[:-1], values.shape[-1] + 8), NAN, dtype=values.dtype)
    outer[..., 3:-5] = values
    return outer[..., 3:-5]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Step:
    """A decode step over a cache of shuffled pages, and each sequence's rows of it."""

    q: Tensor
    cache: Tensor
    lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    table: Tensor
    own: list[Tensor]
    lora: int

    @classmethod
    def make(cls, kind, heads, lora, rope, page, lens, q_lens, scale=1.0) -> Step:
        dtype, kv_dtype = kind
        width, used = lora + rope, [-(-n // page) for n in lens]
        order = torch.randperm(sum(used) + 3).int()
        cache = torch.full((len(order) * page, width), NAN).to(kv_dtype)
        table = order[-1].repeat(len(lens), max(used))
        own = []
        for i, (length, pages) in enumerate(zip(lens, used, strict=True)):
            table[i, :pages] = order[sum(used[:i]) :][:pages]
            slots = table[i].long().repeat_interleave(page) * page + torch.arange(page).repeat(
                max(used)
            )
            own.append((torch.randn(length, width) * scale).to(kv_dtype))
            cache.view(torch.uint8)[slots[:length]] = own[-1].view(torch.uint8)
        q = torch.randn(sum(q_lens) or len(lens), heads + 2, width).to(dtype)[:, 1 : heads + 1]
        return cls(inside(q), cache.view(-1, page, width), lens, q_lens, table, own, lora)

    def kernel(self, sequences: int, pages: int, most: int) -> tuple[Any, Any]:
        """(the kernel, a state for steps of so many sequences with so many queries each)."""
        page, heads = self.cache.shape[1], self.q.shape[1]
        dims = {"heads": heads, "kv_lora": self.lora, "qk_rope": self.q.shape[2] - self.lora}
        facts = facts_for(
            CpuPlatform().info(), name(self.q.dtype), Dims(dims), page, name(self.cache.dtype)
        )
        kernel = attention.MlaDecodeNative(facts)
        return kernel, kernel.state(Limits(99, sequences, pages, page, heads, "cpu", most))

    def run(self, kernel: Any = None, state: Any = None) -> Tensor:
        if kernel is None:
            pages, most = self.table.shape[1] + 2, max(self.q_lens, default=1)
            kernel, state = self.kernel(len(self.lens) + 1, pages, most)
        lens = torch.tensor(self.lens, dtype=torch.int32)
        part = DecodePart(self.table, lens, self.lens, self.q_lens)
        none = torch.empty(0, dtype=torch.int64)
        kernel.prepare(state, Batch(none, none, none, none, decode=part))
        return kernel.run(state, self.q, self.cache, 0.07)

    def expected(self) -> Tensor:
        want, row = [], 0
        counts = self.q_lens or (1,) * len(self.lens)
        for keys, length, count in zip(self.own, self.lens, counts, strict=True):
            for j in range(count):
                k = keys[: length - (count - 1 - j)].double()
                want.append((self.q[row].double() @ k.T * 0.07).softmax(-1) @ k[:, : self.lora])
                row += 1
        return torch.stack(want)


def test_one_state_serves_steps_of_several_queries_and_of_one():
    torch.manual_seed(0)
    sizes = [((30, 40), (2, 3)), ((5, 17, 33, 64, 1), ()), ((20, 50, 9), (1, 4, 2)), ((7, 90), ())]
    steps = [Step.make(KINDS[0], 4, 64, 16, 16, *each) for each in sizes]
    kernel, state = steps[0].kernel(6, 8, 4)
    for step in (*steps, *reversed(steps)):
        close(step.run(kernel, state), step.expected())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{name(k[0])}-{name(k[1])}")
@every_isa
@given(
    heads=st.sampled_from([1, 3, 8, 16, 17, 33]),
    widths=st.sampled_from([(512, 64), (37, 9), (7, 1), (64, 2), (131, 0), (1030, 10)]),
    page=st.integers(1, 64),
    sequences=st.lists(st.tuples(lengths, st.integers(1, 4)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@example(16, (512, 64), 16, [(n, 1) for n in EDGES], 0)
@example(16, (512, 64), 64, [(n + 3, 4) for n in EDGES], 0)
@example(128, (32, 16), 16, [(386, 3), (5, 5)], 0)
def test_decode(isa, kind, heads, widths, page, sequences, seed):
    torch.manual_seed(seed)
    lens = tuple(max(n, count) for n, count in sequences)
    step = Step.make(kind, heads, *widths, page, lens, tuple(count for _, count in sequences))
    close(step.run(), step.expected())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{name(k[0])}-{name(k[1])}")
@pytest.mark.parametrize("heads", [1, 16, 40])
def test_decode_of_more_rows_than_are_kept_at_a_time(isa, kind, heads):
    """Chunks of prompts beside decoded tokens: one that sees nothing else, and one far behind."""
    torch.manual_seed(0)
    lens, q_lens = (170, 40, 700, 9), (170, 3, 130, 1)
    close((step := Step.make(kind, heads, 64, 16, 16, lens, q_lens)).run(), step.expected())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{name(k[0])}-{name(k[1])}")
def test_decode_of_very_unequal_scores(isa, kind):
    """Maxima that move from block to block by more than a float's exponent holds."""
    torch.manual_seed(0)
    step = Step.make(kind, 16, 64, 16, 8, (900, 97), (2, 1), scale=30.0)
    slow = torch.linspace(0.05, 1, 900)[:, None]
    step.own[0] = (step.own[0].float() * slow).to(kind[1])
    slots = step.table[0].long().repeat_interleave(8) * 8 + torch.arange(8).repeat(
        step.table.shape[1]
    )
    step.cache.view(torch.uint8).flatten(0, 1)[slots[:900]] = step.own[0].view(torch.uint8)
    close(step.run(), step.expected())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=name)
def test_every_fp8_value_is_read_exactly(isa, dtype):
    """A single key's latent is the result: every code but NaN, subnormals included."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(2)[:-17].contiguous()  # not a whole vector
    cache = torch.cat((codes, codes[:1])).view(torch.float8_e4m3fn).view(1, 1, -1)
    q = torch.zeros(1, 1, cache.shape[2], dtype=dtype)
    table = torch.zeros(1, 1, dtype=torch.int32)
    got = Step(q, cache, (1,), (1,), table, [], len(codes)).run()
    assert torch.equal(got[0, 0].float(), cache[0, 0, :-1].float())


def test_fp8_nan_comes_through(isa):
    cache = torch.zeros(1, 4, 70).to(torch.float8_e4m3fn)
    cache.view(torch.uint8)[0, 2, 7] = 0xFF
    table = torch.zeros(1, 1, dtype=torch.int32)
    for dtype in TOLERANCE:
        q = torch.ones(1, 2, 70, dtype=dtype)
        assert Step(q, cache, (4,), (1,), table, [], 64).run().isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=name)
def test_a_nan_in_the_cache_comes_through(isa, dtype):
    """A NaN score must not be taken for a very small one."""
    torch.manual_seed(0)
    step = Step.make((dtype, dtype), 3, 32, 9, 16, (400, 140), (1, 1))
    clean = step.cache.clone()
    for place in (0, 70, 399):  # in the first block, a later one, the last row of the last range
        step.cache.copy_(clean)
        page = step.table[0, place // 16]
        step.cache[page, place % 16, 40] = NAN  # of the rotated part: no value has it
        got = step.run()
        assert got[0].isnan().all() and not got[1].isnan().any()


def over_threads(call) -> list[Tensor]:
    """The same call on one, two and three threads."""
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(call())
    finally:
        torch.set_num_threads(before)
    return results


def same_bits(results: list[Tensor]) -> None:
    assert not results[0].isnan().any()
    for other in results[1:]:
        assert torch.equal(results[0], other), int((results[0] != other).sum())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{name(k[0])}-{name(k[1])}")
def test_decode_does_not_depend_on_threads_or_neighbours(isa, kind):
    torch.manual_seed(0)
    step = Step.make(kind, 21, 160, 9, 16, (2500, 7, 629), (1, 3, 2))
    results = over_threads(step.run)
    same_bits(results)
    alone = Step(
        step.q[4:], step.cache, step.lens[2:], step.q_lens[2:], step.table[2:], [], step.lora
    )
    assert torch.equal(alone.run(), results[0][4:])


def segments(*lens: int) -> Segments:
    return Segments(lens, torch.tensor([0, *lens]).cumsum(0).int())


def in_parts(q: Tensor, k: Tensor, v: Tensor, nope: int) -> tuple[Tensor, ...]:
    """Queries and keys apart; keys have the first head's rope part in all heads afterwards."""
    k[..., nope:] = k[:, :1, nope:]
    return q[..., :nope], q[..., nope:], k[..., :nope], k[:, 0, nope:], v


def prefill_expected(q, k, v, q_lens, k_lens, causal, scale) -> tuple[Tensor, Tensor]:
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    q0 = k0 = 0
    for nq, nk in zip(q_lens, k_lens, strict=True):
        rows, cols = slice(q0, q0 + nq), slice(k0, k0 + nk)
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k[cols].double()) * scale
        if causal:
            seen = torch.ones(nq, nk, dtype=torch.bool).tril(nk - nq)
            scores = scores.masked_fill(~seen, float("-inf"))
        sums = torch.logsumexp(scores, -1)
        weights = (scores - sums.clamp(min=-1e300).unsqueeze(-1)).exp()
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v[cols].double())
        lse[rows] = sums.T
        q0, k0 = q0 + nq, k0 + nk
    return out, lse


@pytest.mark.parametrize("dtype", TOLERANCE, ids=name)
@every_isa
@given(
    heads=st.integers(1, 3),
    widths=st.sampled_from([(192, 128), (24, 12), (37, 9), (1, 7), (64, 65), (33, 200)]),
    spans=st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from([0, *EDGES[:11]]) | st.integers(0, 200)),
        max_size=4,
    ),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
@example(2, (192, 128), [(n, n) for n in (1, 16, 63, 64, 65, 95, 96, 97, 200)], True, 0)
@example(1, (192, 128), [(7, 300), (130, 140), (9, 0), (0, 9), (12, 5)], True, 0)
@example(1, (192, 128), [(70, 300), (3, 96), (9, 0), (0, 9), (12, 5)], False, 0)
def test_prefill(isa, dtype, heads, widths, spans, causal, seed):
    torch.manual_seed(seed)
    d, dv = widths
    q_lens, k_lens = tuple(a for a, _ in spans), tuple(b for _, b in spans)
    q, k, v = (
        inside(torch.randn(sum(lens), heads, n).to(dtype))
        for lens, n in ((q_lens, d), (k_lens, d), (k_lens, dv))
    )
    parts = in_parts(q, k, v, d - d // 3)
    args = (*parts, segments(*q_lens), segments(*k_lens), causal, d**-0.5 * 2)
    out, lse = attention.mha_prefill_native(*args)
    want, sums = prefill_expected(q, k, v, q_lens, k_lens, causal, d**-0.5 * 2)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(lse.isinf(), sums.isinf())
    if out.numel() and want.any():
        close(out, want)
        seen = ~sums.isinf()
        assert (lse[seen] - sums[seen]).abs().max() < (2e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=name)
def test_prefill_passes_nan_on(isa, dtype):
    q, k, v = (torch.randn(200, 2, 40).to(dtype) for _ in range(3))
    k[150, 1, 31] = NAN
    segs = segments(200)
    out, lse = attention.mha_prefill_native(*in_parts(q, k, v, 32), segs, segs, True, 0.2)
    assert out[150:, 1].isnan().all() and lse[150:, 1].isnan().all()
    assert not out[:150].isnan().any() and not out[:, 0].isnan().any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=name)
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_prefill_at_any_scale(isa, dtype, scale):
    q, k, v = (torch.randn(100, 1, 24).to(dtype) for _ in range(3))
    segs = segments(100)
    out, _ = attention.mha_prefill_native(*in_parts(q, k, v, 16), segs, segs, True, scale)
    close(out, prefill_expected(q, k, v, (100,), (100,), True, scale)[0])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=name)
def test_prefill_does_not_depend_on_threads(isa, dtype):
    q, k, v = (torch.randn(300, 3, 48).to(dtype) for _ in range(3))
    segs = segments(260, 40)
    call = (*in_parts(q, k, v, 32), segs, segs, True, 0.2)
    for part in (0, 1):
        same_bits(over_threads(lambda: attention.mha_prefill_native(*call)[part]))  # noqa: B023
