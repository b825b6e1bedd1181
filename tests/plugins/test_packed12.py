"""bfloat16 in 12 bits on the host, by the stand-ins: what has a code, what is held besides, and
which kernel serves. test_packed12_on_device.py has the kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vendor_doubles import packed12 as double
from vendor_doubles.compiled import standing_in

from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.ops.reference.cases import Maker
from ds_runtime_cuda.gates import COLUMNS, ROWS, TILE
from ds_runtime_cuda.packed12 import format as packed12
from ds_runtime_cuda.packed12 import linear
from ds_runtime_kit.checks.conformance import facts_for
from examples import examples

FACTS = facts_for(DeviceInfo("cuda", "a GPU", "sm90"), "bfloat16")


@pytest.fixture(autouse=True)
def host(monkeypatch):
    with standing_in(monkeypatch):
        yield


def normal(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * 0.02).bfloat16()


def test_a_tile_holds_what_its_size_says():
    assert (ROWS, COLUMNS, TILE) == (128, 64, double.TILE)
    p = double.places()
    assert len({*zip(p.row.tolist(), p.column.tolist(), strict=True)}) == 128 * 64
    assert sorted({*p.low.tolist(), *p.high.tolist()}) == list(range(12_288))
    own = {*zip(p.high.tolist(), p.shift.tolist(), strict=True)}
    assert len(own | {*zip(p.sign.tolist(), p.sign_shift.tolist(), strict=True)}) == 2 * 8192


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(128, 64), (130, 128), (1, 64)]), st.data())
def test_weights_come_back_bit_for_bit(seed, shape, data):
    torch.manual_seed(seed)
    rows, columns = shape
    weight = normal(rows, columns)
    bits = weight.view(torch.int16).view(-1)
    odd = st.tuples(st.integers(0, rows * columns - 1), st.integers(-(2**15), 2**15 - 1))
    for at, value in data.draw(st.lists(odd, max_size=8)):
        bits[at] = value
    coded = packed12.encode(weight, "nothing")
    if coded is None:  # an exponent too far above the window of most, in which the median lies
        exponents = bits.int() >> 7 & 255
        far = packed12._MOST - (packed12._WINDOW - 1)
        assert int(exponents.max()) - int(exponents.median()) > far
        return
    got = double.stacked(coded.tiles, coded.power, columns // 64)[:rows]
    assert torch.equal(got.nan_to_num(nan=7.0), weight.double().nan_to_num(nan=7.0))


def test_what_has_no_code_is_not_held_besides():
    many = torch.randint(-(2**15), 2**15, (128, 128), dtype=torch.int16).view(torch.bfloat16)
    few = normal(128, 64)
    few[:33, 0] = 0  # zeros have no exponent among those of weights, and there is room for 32
    for weight in (many, few, torch.zeros(128, 64, dtype=torch.bfloat16)):
        assert packed12.encode(weight.contiguous(), "nothing") is None
    few[:20, 0] = 0.02
    assert packed12.encode(few, "nothing") is not None


@pytest.mark.parametrize("kind", [linear.LinearDense12, linear.LinearFew12])
def test_a_weight_without_codes_is_multiplied_as_it_is(kind):
    make = Maker(FACTS, "packed12")
    x = torch.randn(3, 128).bfloat16()
    for zeros, share in ((0, packed12.TILE / (128 * 64)), (40, 0)):
        weight = make.weight(200, 128)
        weight.parts[0].tensors["weight"][:zeros] = 0
        kernel = kind(FACTS)
        packed = kernel.pack(weight, FACTS)
        dense = packed.tensors["weight"].nbytes
        assert packed.nbytes - dense == (256 * 128 * share if share else 0)
        want = x.double() @ weight.dequantise(torch.float64).T
        torch.testing.assert_close(kernel.apply(x, packed).double(), want, rtol=1e-2, atol=1e-2)
        assert kernel.apply(x[:0], packed).shape == (0, 200)
        assert torch.equal(packed.dequantise().double(), weight.dequantise(torch.float64))


def test_the_tile_of_a_call():
    def tile(tokens: int, rows: int) -> tuple[int, int] | None:
        found = linear._tile(tokens, rows, 132)
        return found and (found.tokens, found.weights)

    head, small_head = 129_280, 102_400  # the latter's units of two tiles end unevenly
    assert [tile(n, head) for n in (1, 8, 9, 33, 65, 128)] == [
        (8, 2), (8, 2), (16, 1), (64, 2), (128, 2), (128, 2)
    ]  # fmt: skip
    assert [tile(n, small_head) for n in (8, 32, 64, 128)] == [
        (8, 1), (32, 1), (64, 1), None
    ]  # fmt: skip
    assert tile(129, head) is None
