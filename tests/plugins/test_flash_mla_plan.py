"""How the CUDA plugin divides sequences for FlashMLA: all blocks once, and at what cost."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import run_apart
from vendor_doubles.flash_plan import check_plan

from ds_runtime.api import Limits, UnsupportedError
from ds_runtime_cuda import flash_mla, flash_mla_plan
from examples import examples


def planned(lens, parts, heads=128):
    of = torch.tensor(lens, dtype=torch.int32)
    tiles, splits = flash_mla_plan.plan(of, parts, heads)
    assert tiles.shape == (parts, 8)
    return tiles, check_plan(tiles, splits, of)


LENS = st.lists(st.integers(0, 700) | st.integers(0, 200_000), min_size=1, max_size=200)


@given(LENS, st.integers(1, 160), st.sampled_from([16, 64, 128]))
@example([0], 1, 128)
@example([1] * 200, 1, 16)
@example([64] * 130, 66, 128)
@settings(deadline=None, max_examples=examples(200))
def test_every_block_is_computed_once(lens, parts, heads):
    planned(lens, parts, heads)


@pytest.mark.parametrize(
    ("rows", "length", "pieces"),
    # What was fastest on an H200 of all divisions that were tried, or within 4 % of it.
    [
        (1, 2000, 16), (1, 8192, 22), (4, 600, 5), (8, 600, 5), (24, 600, 2), (32, 600, 2),
        (64, 600, 1), (128, 600, 1), (256, 600, 1), (4, 8192, 16), (8, 8192, 8),
        (16, 3000, 4), (32, 2000, 2), (32, 8192, 2),
    ],
)  # fmt: skip
def test_equal_sequences_are_divided_as_measured(rows, length, pieces):
    tiles, found = planned([length] * rows, 66)
    of = {sum(begin < end for begin, end in p) for p in found}
    assert of == {pieces}
    assert (tiles[:, 0] < rows).sum() == -(-rows * pieces // -(-rows // 66)) + (pieces == 1)


def test_more_heads_cost_more_to_sum():
    lens = [4000] * 3
    few, many = (sum(map(len, planned(lens, 132, heads)[1])) for heads in (1, 2048))
    assert few > many


def test_a_piece_of_nothing_is_summed_where_no_sequence_is_cut():
    _, found = planned([64] * 3, 66)
    assert found[:2] == [[(0, 1)], [(0, 1)]] and found[2] == [(0, 1), (0, 0)]
    assert planned([64], 1)[1] == [[(0, 1)]]


def test_another_layout_of_plans_is_refused(monkeypatch):
    def older(lens, *_, use_legacy):  # begin, its block, end, its block, piece
        tiles = torch.zeros(4, 8, dtype=torch.int32)
        tiles[1, [0, 2]], tiles[2:, 0], tiles[:2, 3] = 1, 2, 1
        return tiles, torch.tensor([0, 1, 2], dtype=torch.int32)

    lib = SimpleNamespace(
        get_mla_metadata=lambda: (object(), None), get_mla_decoding_metadata=older
    )
    monkeypatch.setattr(flash_mla, "_library", lambda: lib)
    kernel = flash_mla.MlaDecode(SimpleNamespace(dims={"heads": 128}))
    limits = Limits(
        max_tokens=1, max_sequences=1, max_pages_per_sequence=1, page_size=64, heads=128,
        device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"plans otherwise than sgl-flash-mla 1\.0\.0"):
        kernel.state(limits)


CHECKS = """
import random
import torch
from interpreter import patched_once
from ds_runtime_cuda import flash_mla_plan_device, flash_mla_plan

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cpu":
    patched_once().__enter__()  # for the rest of this process
random.seed(0)
cases = [([0], 1), ([5], 66), ([64] * 130, 66), ([0, 700, 0, 0, 128], 3), ([1] * 90, 2)]
cases += [([8192] * 5, 66), ([600] * 32, 66), ([10**6, 3, 70_000], 132)]
for _ in range(12):
    rows, most = random.randint(1, 40), random.choice([100, 2000, 40_000])
    cases.append(([random.randint(0, most) for _ in range(rows)], random.choice([1, 7, 66, 132])))
for lens, parts in cases:
    for heads in (16, 128):
        of = torch.tensor(lens, dtype=torch.int32)
        want = flash_mla_plan.plan(of, parts, heads)
        got = torch.full((parts, 8), -7, dtype=torch.int32, device=device)
        splits = torch.full((len(lens) + 1,), -7, dtype=torch.int32, device=device)
        flash_mla_plan_device.write_plan(of.to(device), heads, got, splits)
        assert torch.equal(got.cpu(), want[0]), (lens, parts, heads, got, want[0])
        assert torch.equal(splits.cpu(), want[1]), (lens, parts, heads)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_plans_the_same():
    run_apart(CHECKS)
