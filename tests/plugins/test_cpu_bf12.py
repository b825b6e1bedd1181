"""bfloat16 weights in 12 bits each: every bit comes back, and what does not fit stays in 16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowing import using

from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime_cpu import native, panels
from ds_runtime_cpu.experts import ExpertsNative
from ds_runtime_cpu.linear import LinearNative
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import facts_for
from examples import examples

BF16 = torch.bfloat16
WIDE, NARROW = panels.dense(BF16), panels.Form(panels._BF12, BF16)
FACTS = facts_for(CpuPlatform().info(), "bfloat16")
every_isa = pytest.mark.parametrize("isa", native.runnable())


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16)


def of_bits(patterns: torch.Tensor) -> torch.Tensor:
    return patterns.to(torch.int16).view(BF16)


def exact(unpacked: torch.Tensor) -> torch.Tensor:
    """The bits of values that came back in float32."""
    return (unpacked.view(torch.int32) >> 16).to(torch.int16)


def narrowed(values: torch.Tensor) -> torch.Tensor | None:
    n, k = values.shape
    wide, packed = WIDE.empty(1, n, k)[0], NARROW.empty(1, n, k)[0].fill_(255)
    WIDE.pack(wide, values)
    return packed if panels.narrow(wide, packed, n, k) else None


def room(k: int) -> int:
    """Exceptions that a panel may have."""
    return -(-k // 32) * 32 // 8


def random(n: int, k: int) -> torch.Tensor:
    return (torch.randn(n, k) / k**0.5).to(BF16)


def weight(values: torch.Tensor) -> Weight:
    return Weight((WeightPart("w", "dense", tuple(values.shape), {"weight": values}),))


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_every_bit_comes_back(data):
    """From every variant, which all make the same panels of it."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    n, k = draw(st.integers(1, 200)), draw(st.integers(1, 300))
    values = random(n, k)
    values[:: draw(st.integers(1, 9))] *= draw(st.sampled_from([0.0, -0.0, 1.0, 2.0**9]))
    for panel in values.split(64):  # any bits, as many as there is certainly room for
        count = draw(st.integers(0, room(k) // 2))
        rows, cols = torch.randint(panel.shape[0], (count,)), torch.randint(k, (count,))
        panel[rows, cols] = of_bits(torch.randint(-(2**15), 2**15, (count,)))
    found = []
    for isa in native.runnable():
        with native.using(isa):
            packed = narrowed(values)
            if packed is None:  # by chance more of them are rare than there is room for
                found.append(None)
                continue
            assert torch.equal(exact(NARROW.unpack(packed, n, k)), bits(values))
            found.append(packed)
    assert all(f is None for f in found) or all(torch.equal(f, found[0]) for f in found)


@every_isa
def test_all_patterns(isa):
    """In panels of at most 15 high bytes, none of which needs an exception."""
    patterns = torch.arange(2**16).view(256, 256).split(15)
    with native.using(isa):
        for some in patterns:
            values = of_bits(some.reshape(64, -1)[:, torch.randperm(some.numel() // 64)])
            packed = narrowed(values)
            assert packed is not None
            assert int(packed[16:20].view(torch.int32)) == 0
            assert torch.equal(exact(NARROW.unpack(packed, *values.shape)), bits(values))


@every_isa
@pytest.mark.parametrize("k", [1, 31, 32, 600])
def test_the_last_exception_that_fits(isa, k):
    """In the second of three panels; 15 exponents and a few others."""
    values = of_bits((torch.arange(150 * k) % 15 + 0x30).view(150, k) << 8 | 0x55)
    fits, most = values.clone(), min(room(k), 64 * k // 16)
    places = torch.randperm(64 * k)[: most + 1]
    fits[64:128].view(-1)[places[:most]] = of_bits(torch.full((most,), 0x7F81))  # a NaN
    over = fits.clone()
    over[64:128].view(-1)[places] = of_bits(torch.full((most + 1,), 0x7F81))
    with native.using(isa):
        packed = narrowed(fits)
        assert packed is not None
        assert torch.equal(exact(NARROW.unpack(packed, 150, k)), bits(fits))
        if most == room(k) and k >= 32:
            assert narrowed(over) is None


@every_isa
@pytest.mark.parametrize(("n", "k"), [(64, 1024), (130, 1409), (7, 90)])
def test_exceptions_are_weights(isa, n, k):
    """Most of a result comes from them, for few tokens and for many, which see the same bits."""
    values = random(n, k)
    for panel in values.split(64):
        count = room(k) - room(k) // 4
        rows, cols = torch.randint(panel.shape[0], (count,)), torch.randint(k, (count,))
        rows[-1], cols[-1] = panel.shape[0] - 1, k - 1
        panel[rows, cols] = (torch.randn(count) * 64).to(BF16)
    x = torch.randn(140, k).to(BF16)
    want, size = x.double() @ values.double().T, x.double().abs() @ values.double().abs().T
    before = torch.get_num_threads()
    with using(isa, narrow=True):
        kernel = LinearNative(FACTS)
        packed = kernel.pack(weight(values), FACTS)
        assert packed.tensors["form"] == NARROW
        assert torch.equal(packed.dequantise(), values.float())
        whole = kernel.apply(x, packed)
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for count in (1, 2, 3, 4, 6, 7, 12, 16, 33, 96, 97, 140):
                    assert torch.equal(kernel.apply(x[:count], packed), whole[:count])
        finally:
            torch.set_num_threads(before)
    assert ((whole - want).abs() <= 2**-8 * want.abs() + 3e-6 * size).all()


@every_isa
@pytest.mark.parametrize("narrow", [False, True])
def test_uniform_bits_stay_as_they_are(isa, narrow):
    values = of_bits(torch.randint(0, 0x4000, (100, 300)))
    with using(isa, narrow):
        packed = LinearNative(FACTS).pack(weight(values), FACTS)
    assert packed.tensors["form"] == WIDE and packed.nbytes == 128 * 320 * 2
    assert torch.equal(packed.dequantise(), values.float())


class Source:
    """Experts of which one matrix does not fit: (expert, 0 .. 2 for gate, up and down)."""

    format = "dense"

    def __init__(self, misfit: tuple[int, int] | None) -> None:
        self.num_experts, self.hidden, self.intermediate = 4, 130, 70
        shapes = ((70, 130), (70, 130), (130, 70))
        self.values = [[random(*s) for s in shapes] for _ in range(4)]
        if misfit:
            e, which = misfit
            odd = torch.randint(0, 0x3F00, shapes[which])
            self.values[e][which] = of_bits(odd)

    def expert(self, index: int):
        return tuple(weight(v) for v in self.values[index])


@every_isa
@pytest.mark.parametrize("misfit", [None, (0, 0), (2, 1), (1, 2), (3, 2)])
def test_experts_of_a_layer_are_held_alike(isa, misfit):
    torch.manual_seed(1)
    source = Source(misfit)
    x, shares = torch.randn(9, 130).to(BF16), torch.rand(9, 2)
    ids = torch.randint(0, 4, (9, 2), dtype=torch.int32)
    results = []
    for narrow in (True, False):
        with using(isa, narrow):
            kernel = ExpertsNative(FACTS)
            packed = kernel.pack(source, FACTS)
            results.append(kernel.apply(x, shares, ids, packed))
            gate_up = torch.stack([torch.cat(v[:2]) for v in source.values])
            assert torch.equal(packed.dequantise(), gate_up.float())
        form = NARROW if narrow and misfit is None else WIDE
        assert packed.tensors["forms"] == (form, form)
    if misfit:
        assert torch.equal(*results)
    else:
        torch.testing.assert_close(*results, rtol=2**-6, atol=1e-3)


def test_the_library_says_whether_it_pays():
    for isa in native.runnable():
        with native.using(isa):
            form, _ = panels.pack_weight(weight(random(70, 40)), BF16)
            assert native.library().narrows == (isa in ("avx512bf16", "amx"))
            assert form == (NARROW if native.library().narrows else WIDE)
            form, _ = panels.pack_weight(weight(random(70, 40).float()), torch.float32)
            assert form == panels.dense(torch.float32)
