"""Native matmuls with int8 and int4 weights: exact in what they round to, in every variant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime_cpu import native
from ds_runtime_cpu.linear import LinearNative
from ds_runtime_cpu.panels import dense, form_of
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import facts_for
from examples import examples

FORMATS = ("int8_channel", "int4_group", "int4_group zeros")
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8}  # of a result
SUMMING = 3e-6  # relative to the sum of magnitudes: float32 in any order
DTYPES = sorted(ROUNDING, key=str)
every_isa = pytest.mark.parametrize("isa", native.runnable())


def facts(dtype: torch.dtype):
    return facts_for(CpuPlatform().info(), str(dtype).removeprefix("torch."))


def make(rows: int, cols: int, fmt: str, group: int = 32, cut: int = 0) -> WeightPart:
    """Random codes, the smallest and the greatest among them; cut: columns of a group before it."""
    name, _, zeros = fmt.partition(" ")
    low, high = (-128, 128) if name == "int8_channel" else (0, 16) if zeros else (-8, 8)
    block = (1, cols + cut if name == "int8_channel" else group)
    shape = (rows, -(-(cols + cut) // block[1]))
    tensors = {
        "weight": torch.randint(low, high, (rows, cols), dtype=torch.int8),
        "scale": torch.rand(shape) + 0.1,
    }
    if zeros:
        tensors["zero"] = torch.rand(shape) * 15  # need not be whole
    return WeightPart("w", name, (rows, cols), tensors, block, (0, cut))


def rounded(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 activations as the kernel's groups see them, and the step of each element."""
    out, step = x.double().clone(), torch.zeros(x.shape, dtype=torch.float64)
    for values, steps in zip(out.split(group, 1), step.split(group, 1), strict=True):
        steps += values.abs().amax(1, keepdim=True) / 127
        values.copy_((values / steps.where(steps > 0, 1)).round() * steps)
    return out, step


def check(got: torch.Tensor, x: torch.Tensor, weight: Weight, group: int) -> None:
    """Element by element; near a tie a float32 quotient may be rounded the other way."""
    w = weight.dequantise(torch.float64)
    seen, step = rounded(x, group)
    exact = x.double() / step.where(step > 0, 1)
    ties = ((exact - exact.floor() - 0.5).abs() < 1e-4) * step
    want, size = seen @ w.T, seen.abs() @ w.abs().T
    if weight.format == "int4_group":  # codes and zero points are summed apart
        size = size + seen.abs() @ torch.ones_like(w).T * w.abs().amax()
    off = SUMMING * size + ties @ w.abs().T
    assert got.shape == want.shape and got.is_contiguous()
    assert (
        (got.double() - want).abs() <= off + 1.01 * ROUNDING[got.dtype] * (want.abs() + off)
    ).all()


@every_isa
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_shapes(isa, data):
    """Parts, cut groups, partial panels and blocks, strided and misaligned rows."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    fmt, dtype = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(DTYPES))
    k, tokens = draw(st.integers(1, 600)), draw(st.integers(0, 40))
    group = draw(st.sampled_from((32, 64, 96, 128, 160, 1024)))
    cut = draw(st.sampled_from((0, 32, 64, 96)))
    rows = draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    weight = Weight(tuple(make(n, k, fmt, group, cut) for n in rows))
    left = draw(st.integers(0, 3))
    wide = torch.full((tokens, left + k + 2), float("nan")).to(dtype)
    x = wide[:, left : left + k]
    x.copy_(torch.randn(tokens, k) * draw(st.sampled_from((1e-6, 1.0, 1e4))))
    with native.using(isa):
        kernel = LinearNative(facts(dtype))
        packed = kernel.pack(weight, facts(dtype))
        form = packed.tensors["form"]
        assert form.code != dense(dtype).code
        check(kernel.apply(x, packed), x, weight, form.group or k)
        torch.testing.assert_close(packed.dequantise(), weight.dequantise(), rtol=1e-6, atol=1e-5)
    padded = sum(rows) + 63, k + 63
    heads = 8 / k if fmt == "int8_channel" else 8 / form.group + 8 / k
    size = 1 if fmt == "int8_channel" else 0.5
    assert packed.nbytes <= padded[0] * padded[1] * (size + heads)


@every_isa
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("k", [7168, 18432])
@pytest.mark.parametrize("tokens", [1, 7, 17])
def test_the_greatest_sums(isa, fmt, k, tokens):
    """Codes at the ends of their range, activations of ±127: where 16 bits would overflow."""
    part = make(64, k, fmt, 128)
    low, high = part.tensors["weight"].aminmax()
    part.tensors["weight"][::2], part.tensors["weight"][1::2] = low, high
    part.tensors["scale"].fill_(2.0**-10)
    if "zeros" in fmt:
        part.tensors["zero"].fill_(7)
    x = torch.full((tokens, k), 127.0)
    x[::2] *= -1
    weight = Weight((part,))
    with native.using(isa):
        kernel = LinearNative(facts(torch.float32))
        got = kernel.apply(x, kernel.pack(weight, facts(torch.float32)))
    assert torch.equal(got.double(), x.double() @ weight.dequantise(torch.float64).T)


@every_isa
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_every_size(isa, fmt):
    """Zeros, numbers near the ends of float32, and rows that are not numbers."""
    torch.manual_seed(3)
    weight = Weight((make(70, 200, fmt),))
    x = torch.randn(9, 200)
    x[1] = 0
    x[2] *= 1e-37
    x[3] *= 1e30
    x[4, 33], x[5, 199], x[6, 0] = float("nan"), float("inf"), float("-inf")
    x[7, :100] = 0
    with native.using(isa):
        kernel = LinearNative(facts(torch.float32))
        packed = kernel.pack(weight, facts(torch.float32))
        got = kernel.apply(x, packed)
    numbers = [0, 1, 2, 3, 7, 8]
    check(got[numbers], x[numbers], weight, packed.tensors["form"].group or 200)
    assert torch.equal(got[1], torch.zeros(70)) and got[4:7].isnan().all()


@every_isa
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_depends_on_nothing_but_itself(isa, fmt, dtype):
    """Neither on threads, nor on the other tokens, nor on the kernel that their number chooses."""
    torch.manual_seed(4)
    weight, x = Weight((make(1300, 2048, fmt, 128),)), torch.randn(130, 2048).to(dtype)
    before = torch.get_num_threads()
    try:
        with native.using(isa):
            kernel = LinearNative(facts(dtype))
            packed = kernel.pack(weight, facts(dtype))
            want = kernel.apply(x, packed)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for tokens in (1, 2, 5, 8, 13, 130):
                    assert torch.equal(kernel.apply(x[:tokens], packed), want[:tokens])
    finally:
        torch.set_num_threads(before)


def test_every_variant_gives_the_same_bits():
    """Sums are integers, so only the last rounding could differ, and it does not."""
    torch.manual_seed(5)
    weight, x = Weight((make(100, 300, "int8_channel"),)), torch.randn(20, 300)
    results = []
    for isa in native.runnable():
        with native.using(isa):
            kernel = LinearNative(facts(torch.float32))
            results.append(kernel.apply(x, kernel.pack(weight, facts(torch.float32))))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("fmt", "group", "cut", "kept"),
    [
        ("int8_channel", 0, 40, True),
        ("int4_group", 128, 0, True),
        ("int4_group", 128, 32, True),
        ("int4_group", 128, 7, False),
        ("int4_group", 24, 0, False),
    ],
)
def test_what_stays_in_its_format(fmt, group, cut, kept):
    form = form_of((make(3, 100, fmt, group, cut),), torch.bfloat16)
    assert (form != dense(torch.bfloat16)) is kept
    assert not kept or not form.group or form.group % 32 == 0


def test_rows_too_long_for_int32_are_not_kept():
    part = WeightPart(
        "w",
        "int8_channel",
        (1, 70000),
        {"weight": torch.zeros(1, 70000, dtype=torch.int8), "scale": torch.ones(1, 1)},
        (1, 70000),
    )
    assert form_of((part,), torch.float32) == dense(torch.float32)
