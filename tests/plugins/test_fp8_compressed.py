"""FP8 weights in about 7.3 bits on the host, by the stand-ins: what has a code, what is listed, and
what is held besides. test_fp8_compressed_on_device.py has the kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vendor_doubles import fp8_compressed as double
from vendor_doubles.compiled import standing_in

from ds_runtime_cuda import fp8_compressed
from ds_runtime_cuda.gates import BLOCK, CODED_FP8, MOST_OTHERS, OTHERS_AT
from examples import examples

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def host(monkeypatch):
    with standing_in(monkeypatch):
        yield


def normal(*shape: int, std: float = 60.0) -> torch.Tensor:
    return (torch.randn(*shape) * std).clamp(-448, 448).to(FP8)


def test_a_tile_holds_what_its_size_says():
    assert (BLOCK, OTHERS_AT) == (double.SIDE, double.LIST)
    p = double.places()
    spots = zip(p.row.flatten().tolist(), p.column.flatten().tolist(), strict=True)
    assert len({*spots}) == 128 * 128
    assert sorted(p.code.flatten().tolist()) == list(range(double.ENDS))
    assert 0.92 < CODED_FP8 < 0.94


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4.0, 30.0, 60.0, 110.0, 400.0]), st.data())
def test_weights_come_back_bit_for_bit(seed, std, data):
    torch.manual_seed(seed)
    halves, columns = data.draw(st.sampled_from([(1, 128), (1, 256), (2, 128)]))
    rows = 128 * halves * data.draw(st.integers(1, 2))
    weight = normal(2, rows, columns, std=std)
    bits = weight.view(torch.uint8).view(-1)
    odd = st.tuples(st.integers(0, bits.numel() - 1), st.integers(0, 255))
    for at, value in data.draw(st.lists(odd, max_size=20)):
        bits[at] = value
    coded = fp8_compressed.encode(weight, "nothing", halves)
    assert coded is not None and coded.stride % 16 == 0
    assert coded.tiles.numel() == weight.numel() // 128**2 * coded.stride
    assert coded.stride <= CODED_FP8 * 128**2
    got = double.stacked(
        coded.tiles, coded.stride, coded.base, columns // 128, halves, rows // 128 // halves
    )
    assert torch.equal(got.view(-1), bits)


def test_every_code_comes_back():
    """NaN of either sign, both zeros and numbers without an exponent of their own, too."""
    weight = normal(128, 128)
    weight.view(torch.uint8).view(-1)[: 2 * 256 : 2] = torch.arange(256).to(torch.uint8)
    coded = fp8_compressed.encode(weight, "nothing")
    assert coded is not None
    got = double.stacked(coded.tiles, coded.stride, coded.base, 1)
    assert torch.equal(got, weight.view(torch.uint8))


def test_a_tile_with_too_many_others_is_not_held_besides():
    weight = normal(256, 128)
    bits = weight.view(torch.uint8)
    bits[128:] = 0x50  # one exponent: the lists of this tile are empty
    bits[128:].view(-1)[:MOST_OTHERS] = 0
    assert fp8_compressed.encode(weight, "nothing") is not None
    bits[128:].view(-1)[MOST_OTHERS] = 0
    assert fp8_compressed.encode(weight, "nothing") is None
    assert fp8_compressed.encode(torch.zeros(128, 128).to(FP8), "nothing") is not None


def test_the_list_is_as_long_as_the_longest():
    weight = normal(128, 256)
    coded = fp8_compressed.encode(weight, "nothing")
    assert coded is not None
    tiles = [weight.view(torch.uint8)[:, at : at + 128] for at in (0, 128)]
    longest = max(int(double.others(tile, coded.base).sum()) for tile in tiles)
    assert 0 <= coded.stride - OTHERS_AT - 2 * longest < 16
    assert all(
        max(int(double.others(tile, base).sum()) for tile in tiles) >= longest for base in range(9)
    )
