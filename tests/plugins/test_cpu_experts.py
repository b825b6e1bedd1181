"""Native routed experts in every weight format, against float64 with the format's own rounding."""

from __future__ import annotations

from math import inf

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowing import using

from ds_runtime.ops.reference.matrices.rounding import quantise_part
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime_cpu import native
from ds_runtime_cpu.experts import ExpertsNative
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import facts_for
from examples import examples

FORMATS = (
    *("dense", "dense 12", "fp8_block", "mxfp4"),
    *("int8_channel", "int4_group", "int4_group zeros"),
)
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8}  # of what is stored
SUMMING = 3e-6  # relative to the sum of magnitudes: float32 in any order
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}  # of a norm, as in conformance
DTYPES = sorted(ROUNDING, key=str)
every_isa = pytest.mark.parametrize("isa", native.runnable())


def facts(dtype: torch.dtype):
    return facts_for(CpuPlatform().info(), str(dtype).removeprefix("torch."))


def make(rows: int, cols: int, fmt: str, group: int, dtype: torch.dtype) -> Weight:
    """A random weight whose product with unit inputs has unit size."""
    values = torch.randn(rows, cols) / cols**0.5
    dense = WeightPart("w", "dense", (rows, cols), {"weight": values.to(dtype)})
    if fmt.startswith("dense"):  # in 16 bits or, where that is bfloat16, in 12
        return Weight((dense,))
    if fmt == "fp8_block":
        scale = torch.rand(-(-rows // 128), -(-cols // 128)) * 0.02 / cols**0.5 + 1e-4
        codes = (torch.randn(rows, cols) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "scale": scale}
        return Weight((WeightPart("w", fmt, (rows, cols), tensors, (128, 128)),))
    if fmt == "mxfp4":
        scale = torch.randint(119, 127, (rows, -(-cols // 32)), dtype=torch.uint8)
        scale -= cols.bit_length() // 2
        tensors = {"weight": torch.randint(0, 16, (rows, cols), dtype=torch.uint8), "scale": scale}
        return Weight((WeightPart("w", fmt, (rows, cols), tensors, (1, 32)),))
    name, _, zeros = fmt.partition(" ")
    part = quantise_part(dense, name, group)
    if zeros:
        zero = torch.randint(0, 16, part.tensors["scale"].shape)
        tensors = {**part.tensors, "weight": part.tensors["weight"] + 8, "zero": zero}
        part = WeightPart("w", name, part.shape, tensors, part.block)
    return Weight((part,))


class Source:
    """An ExpertSource over random weights."""

    def __init__(self, count, hidden, inter, fmt, group=32, dtype=torch.float32) -> None:
        self.num_experts, self.hidden, self.intermediate, self.format = count, hidden, inter, fmt
        shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
        self.experts = [tuple(make(*s, fmt, group, dtype) for s in shapes) for _ in range(count)]

    def expert(self, index: int):
        return self.experts[index]


def rounded(
    x: torch.Tensor, error: torch.Tensor, weight: Weight
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [n] as a matmul with this weight sees them, in float64, and how far off its own
    may be, of which it knows x up to `error`: near a tie it may round the other way, and where the
    error is larger than a step, several steps off."""
    if not weight.format.startswith("int"):
        return x, error
    assert weight.parts[0].block is not None
    group = weight.parts[0].block[1]
    seen, off = x.clone(), torch.zeros_like(x)
    for values, errors, wrong in zip(
        x.split(group), error.split(group), off.split(group), strict=True
    ):
        step = values.abs().max() / 127
        if step == 0:
            wrong += errors
            continue
        scaled = values / step
        # the quotient's own error, and that of the step
        unsure = errors / step + scaled.abs() * (1e-6 + errors.max() / (127 * step))
        most, least = (scaled + unsure + 0.5).floor(), (scaled - unsure - 0.5).ceil()
        steps = torch.maximum(most - scaled.round(), scaled.round() - least)
        wrong += steps * step + (scaled.abs() + steps) * errors.max() / 127
    for values in seen.split(group):
        step = values.abs().max() / 127
        if step > 0:
            values.copy_((values / step).round() * step)
    return seen, off


def sums_off(w: torch.Tensor, seen: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """How far off w @ seen may be, with `seen` off by `wrong`."""
    return w.abs() @ (SUMMING * seen.abs() + wrong)


def reference(x, weights, ids, source, limit=inf) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [tokens, hidden], and how far off each may be."""
    out, off = torch.zeros(2, *x.shape, dtype=torch.float64)
    stored = ROUNDING[x.dtype] if not source.format.startswith("int") else ROUNDING[torch.float32]
    experts = ids.unique().tolist()
    wide = {e: [w.dequantise(torch.float64) for w in source.expert(e)] for e in experts}
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e, weight = int(ids[t, k]), float(weights[t, k])
            gate, _, down = source.expert(e)
            g_w, u_w, d_w = wide[e]
            seen, wrong = rounded(x[t].double(), torch.zeros(x.shape[1]).double(), gate)
            g, u = g_w @ seen, u_w @ seen
            g_off, u_off = (sums_off(w, seen, wrong) for w in (g_w, u_w))
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            act = F.silu(g) * u
            error = 1.1 * (g_off * u.abs() + g_off * u_off) + F.silu(g).abs() * u_off
            error += (stored + 1e-6) * act.abs()
            seen, wrong = rounded(act, error, down)
            out[t] += weight * (d_w @ seen)
            off[t] += abs(weight) * sums_off(d_w, seen, wrong)
    return out, off + 1.01 * ROUNDING[x.dtype] * (out.abs() + off) + 1e-37


def route(tokens: int, count: int, top_k: int) -> torch.Tensor:
    ids = [torch.randperm(count)[:top_k] for _ in range(tokens)]
    return torch.stack(ids).int() if ids else torch.empty(0, top_k, dtype=torch.int32)


def close(got: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Element by element."""
    want, off = expected
    assert got.shape == want.shape and got.is_contiguous()
    assert ((got.double() - want).abs() <= off).all()


@every_isa
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_shapes(isa, data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    fmt, dtype = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(DTYPES))
    tokens, count = draw(st.integers(0, 24)), draw(st.integers(1, 9))
    hidden, inter = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    top_k, left = draw(st.integers(1, count)), draw(st.integers(0, 3))
    source = Source(count, hidden, inter, fmt, draw(st.sampled_from((32, 64, 96, 128))), dtype)
    ids, weights = route(tokens, count, top_k), torch.rand(tokens, top_k)
    weights[:, : draw(st.integers(0, 1))] = 0
    x = torch.full((tokens, hidden + left + 2), float("nan")).to(dtype)[:, left : left + hidden]
    x.copy_(torch.randn(tokens, hidden) * draw(st.sampled_from((1e-3, 1.0, 30.0))))
    with using(isa, fmt == "dense 12"):
        kernel = ExpertsNative(facts(dtype))
        packed = kernel.pack(source, facts(dtype))
        close(kernel.apply(x, weights, ids, packed), reference(x, weights, ids, source))
        limit = draw(st.sampled_from((0.0, 0.25, 2.0)))
        limited = kernel.limited(x, weights, ids, limit, packed)
        close(limited, reference(x, weights, ids, source, limit))
        gate_up = [torch.cat([w.dequantise() for w in source.expert(e)[:2]]) for e in range(count)]
        torch.testing.assert_close(packed.dequantise(), torch.stack(gate_up), rtol=1e-6, atol=1e-6)


class MixedSource(Source):
    """Zero points in gate and up, or in down alone."""

    def __init__(self, zeros_up: bool) -> None:
        self.num_experts, self.hidden, self.intermediate, self.format = 3, 128, 64, "int4_group"
        zeros = (zeros_up, zeros_up, not zeros_up)
        shapes = ((64, 128), (64, 128), (128, 64))
        kinds = ["int4_group zeros" if z else "int4_group" for z in zeros]
        self.experts = [
            tuple(make(*s, k, 32, torch.bfloat16) for s, k in zip(shapes, kinds, strict=True))
            for _ in range(3)
        ]


@every_isa
@pytest.mark.parametrize("zeros_up", [True, False])
def test_zero_points_in_some_matrices_stay_int4(isa, zeros_up):
    torch.manual_seed(5)
    source = MixedSource(zeros_up)
    ids, weights, x = route(7, 3, 2), torch.rand(7, 2), torch.randn(7, 128).to(torch.bfloat16)
    with native.using(isa):
        kernel = ExpertsNative(facts(torch.bfloat16))
        packed = kernel.pack(source, facts(torch.bfloat16))
        assert packed.nbytes < 3 * 3 * 64 * 128  # not a byte a weight
        close(kernel.apply(x, weights, ids, packed), reference(x, weights, ids, source))


@every_isa
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens(isa, fmt, dtype):
    """Tokens beyond a unit's, an expert with most of them, one with none."""
    torch.manual_seed(1)
    source = Source(4, 256, 160, fmt, 128, dtype)
    ids = route(230, 3, 2)
    ids[:200, 0], ids[:200, 1] = 1, 2
    x, weights = torch.randn(230, 256).to(dtype), torch.rand(230, 2)
    with using(isa, fmt == "dense 12"):
        kernel = ExpertsNative(facts(dtype))
        got = kernel.apply(x, weights, ids, kernel.pack(source, facts(dtype)))
    want, off = reference(x, weights, ids, source)
    close(got, (want, off))
    # What each element may be off by, all are not at once, but for ties that went the other way.
    ties = 1e-3 if fmt.startswith("int") and dtype == torch.float32 else 0
    assert (got - want).norm() <= max(TOLERANCE[dtype], ties) * want.norm()


@every_isa
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 40, 100])
def test_results_do_not_depend_on_threads(isa, fmt, tokens):
    torch.manual_seed(2)
    hidden, inter, dtype = 2000, 900, torch.bfloat16
    source = Source(4, hidden, inter, fmt, 128, dtype)
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
    ids, before, results = route(tokens, 4, 3), torch.get_num_threads(), []
    with using(isa, fmt == "dense 12"):
        kernel = ExpertsNative(facts(dtype))
        packed = kernel.pack(source, facts(dtype))
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(kernel.apply(x, weights, ids, packed))
        finally:
            torch.set_num_threads(before)
    assert not results[0].isnan().any()
    for other in results[1:]:
        assert torch.equal(results[0], other), int((results[0] != other).sum())


@every_isa
@pytest.mark.parametrize("fmt", FORMATS)
def test_results_do_not_depend_on_other_tokens(isa, fmt):
    """400 tokens of which each takes three experts are more results than are kept by pair: they are
    summed by column (BY_PAIR of csrc/experts.cpp), those of a few are not."""
    torch.manual_seed(3)
    tokens, hidden, inter, dtype = 400, 512, 96, torch.bfloat16
    assert tokens * 3 * hidden > 1 << 19
    source = Source(4, hidden, inter, fmt, 32, dtype)
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
    ids = route(tokens, 4, 3)
    with using(isa, fmt == "dense 12"):
        kernel = ExpertsNative(facts(dtype))
        packed = kernel.pack(source, facts(dtype))
        whole = kernel.apply(x, weights, ids, packed)
        close(whole[:16], reference(x[:16], weights[:16], ids[:16], source))
        for some in (slice(0, 1), slice(5, 8), slice(100, 140)):
            alone = kernel.apply(x[some], weights[some], ids[some], packed)
            off = (alone.float() - whole[some].float()).abs().max()
            assert off <= 2 * ROUNDING[dtype] * whole[some].float().abs().max(), (some, float(off))


@every_isa
@pytest.mark.parametrize("fmt", FORMATS)
def test_extremes(isa, fmt):
    """Activations of one size with the largest codes, of one sign per row: the greatest sums."""
    hidden, inter = 4096, 70
    source = Source(2, hidden, inter, fmt)
    low, high = {
        "dense": (-1 / 64, 1 / 64),
        "dense 12": (-1 / 64, 1 / 64),
        "fp8_block": (-448, 448),
        "mxfp4": (15, 7),
        "int8_channel": (-128, 127),
        "int4_group": (-8, 7),
        "int4_group zeros": (0, 15),
    }[fmt]
    for weights in source.experts:
        for weight in weights:
            codes = weight.parts[0].tensors["weight"]
            codes[::2], codes[1::2] = low, high
    x = torch.ones(6, hidden)
    x[1], x[2], x[3], x[4] = -1, 0, 1e-40, x[4] * 2.0**-40
    ids, weights = torch.tensor([[0, 1]] * 6, dtype=torch.int32), torch.tensor([[0.5, 0.0]] * 6)
    with using(isa, fmt == "dense 12"):
        kernel = ExpertsNative(facts(torch.float32))
        got = kernel.apply(x, weights, ids, kernel.pack(source, facts(torch.float32)))
    close(got, reference(x, weights, ids, source))


@every_isa
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_what_is_not_a_number_shows(isa, fmt, bad, tokens):
    source = Source(3, 130, 70, fmt)
    x = torch.randn(tokens, 130)
    x[0, 77] = bad
    with using(isa, fmt == "dense 12"):
        kernel = ExpertsNative(facts(torch.float32))
        got = kernel.apply(
            x, torch.rand(tokens, 2), route(tokens, 3, 2), kernel.pack(source, facts(torch.float32))
        )
    assert not got[0].isfinite().any() if fmt.startswith("dense") else got[0].isnan().all()
    assert got[1:].isfinite().all()


@every_isa
def test_experts_elsewhere_are_left_out(isa):
    torch.manual_seed(3)
    source = Source(3, 64, 64, "dense")
    x, weights = torch.randn(5, 64), torch.rand(5, 3)
    ids = torch.tensor([[0, -1, 2], [3, 1, -1], [-1, -1, -1], [2, 1, 0], [7, -5, 1]]).int()
    with native.using(isa):
        kernel = ExpertsNative(facts(torch.float32))
        packed = kernel.pack(source, facts(torch.float32))
        got = kernel.apply(x, weights, ids, packed)
        here = (ids >= 0) & (ids < 3)
        close(got, reference(x, weights * here, ids.where(here, 0), source))
        assert torch.equal(got[2], torch.zeros(64))
