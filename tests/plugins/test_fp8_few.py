"""FP8 weights for few tokens on the host: the index maps of csrc/fp8_few.cu lane by lane, which
tiles a cluster takes, and which kernel serves. test_fp8_few_on_device.py has the kernel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vendor_doubles.compiled import standing_in

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime_cuda import fp8_few
from examples import examples

FIXTURES = Path(__file__).parents[1] / "core" / "model" / "fixtures"
REST, SIGN = 0x07F007F0, 0x80008000
LANE = np.arange(32)


def halves(words: np.ndarray) -> np.ndarray:
    """float64 [..., 2] of the bfloat16 in 32 bits, low first, times 2^120."""
    low, high = words << 16, words & 0xFFFF0000
    both = np.stack([low, high], -1).astype(np.uint32).view(np.float32)
    return both.astype(np.float64) * 2.0**120


def even(w: np.ndarray) -> np.ndarray:
    return halves((w << 4 & REST) | (w << 8 & SIGN))


def odd(w: np.ndarray) -> np.ndarray:
    return halves((w >> 4 & REST) | (w & SIGN))


def test_every_code_is_widened():
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    want[[0x7F, 0xFF]] = 480, -480  # NaN, as LinearFewFp8 says
    for place in range(4):
        w = (codes.astype(np.uint32) << 8 * place).astype(np.uint32)
        got = (odd if place % 2 else even)(w)[:, place // 2]
        assert np.array_equal(got, want) and np.array_equal(np.signbit(got), np.signbit(want))


def mma(a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
    """PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": a0 to a3 and b0, b1 of
    each lane [32, 2] → c0 to c3 [32, 4]."""
    left, right = np.full((16, 16), np.nan), np.full((16, 8), np.nan)
    for i, part in enumerate(a):
        for e in range(2):
            left[LANE // 4 + i % 2 * 8, LANE % 4 * 2 + e + i // 2 * 8] = part[:, e]
    for i, part in enumerate(b):
        for e in range(2):
            right[LANE % 4 * 2 + e + i * 8, LANE // 4] = part[:, e]
    made = left @ right
    return np.stack([made[LANE // 4 + i // 2 * 8, LANE % 4 * 2 + i % 2] for i in range(4)], -1)


def kernel(
    weight: np.ndarray, scale: np.ndarray, x: np.ndarray, group: int, clusters: int
) -> np.ndarray:
    """out [tokens, rows] of bytes [rows, columns]: csrc/fp8_few.cu in float64, with its indices."""
    (rows, columns), tokens = weight.shape, len(x)
    blocks, ways = columns // 128, 16 // group
    out = np.full((tokens, rows), np.nan)
    met = np.zeros(weight.shape, int)
    units = -(-rows // (16 * group))
    staged = x.reshape(tokens, -1, 4)[:, :, [0, 2, 1, 3]].reshape(tokens, -1)
    for cluster in range(min(clusters, units)):
        for unit in range(cluster, units, clusters):
            sums = np.zeros((2, 16, 16, 8))
            for rank, warp in np.ndindex(2, 16):
                first, end = blocks * rank // 2, blocks * (rank + 1) // 2
                tile, way, own = warp % group, warp // group, end - first
                row = (unit * group + tile) * 16
                upper = np.minimum(row + LANE // 4, rows - 1)
                lower = np.minimum(row + 8 + LANE // 4, rows - 1)
                steps = range(first + own * way // ways, first + own * (way + 1) // ways)
                assert len(steps), "a warp has a block"
                total = np.zeros((32, 4))
                for block in steps:
                    d = np.zeros((32, 4))
                    for half in range(2):
                        at = block * 128 + LANE % 4 * 16 + 64 * half
                        token = np.minimum(LANE // 4, tokens - 1)
                        values = staged[token[:, None], at[:, None] + np.arange(16)]
                        pieces = []
                        for line, there in ((upper, row + LANE // 4), (lower, row + 8 + LANE // 4)):
                            bytes_ = weight[line[:, None], at[:, None] + np.arange(16)]
                            pieces.append(np.ascontiguousarray(bytes_).view("<u4"))
                            inside = there < rows
                            where = line[inside, None], at[inside, None] + np.arange(16)
                            np.add.at(met, where, 1)
                        for j in range(4):
                            up, low = pieces[0][:, j], pieces[1][:, j]
                            a = [even(up), even(low), odd(up), odd(low)]
                            b = [values[:, 4 * j : 4 * j + 2], values[:, 4 * j + 2 : 4 * j + 4]]
                            d += mma(a, b)
                    total += d * scale[min(row, rows - 1) // 128, block]
                for i in range(4):
                    at = LANE // 4 + i // 2 * 8, LANE % 4 * 2 + i % 2
                    sums[rank, warp][at] = total[:, i]
            flat = sums.reshape(2, -1)
            for rank in range(2):
                for i in range(8 * group * tokens):
                    token, row = i // (8 * group), i % (8 * group) + rank * 8 * group
                    parts = row * 8 + token + np.arange(ways) * group * 128
                    if (to := unit * group * 16 + row) < rows:
                        assert np.isnan(out[token, to]), "written once"
                        out[token, to] = flat[:, parts].sum()
    assert (met == 1).all(), "each weight is read once"
    return out


@settings(max_examples=examples(12), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 300),
    blocks=st.integers(2, 37),
    tokens=st.integers(1, 8),
    clusters=st.integers(1, 5),
    data=st.data(),
)
def test_every_weight_meets_its_activation(seed, rows, blocks, tokens, clusters, data):
    group = data.draw(st.sampled_from(fp8_few.groups_for(128 * blocks)))
    draw = np.random.default_rng(seed)
    weight = draw.integers(0, 256, (rows, 128 * blocks), dtype=np.uint8)
    weight[(weight & 0x7F) == 0x7F] = 0
    scale = draw.uniform(0.5, 2, (-(-rows // 128), blocks))
    x = draw.standard_normal((tokens, 128 * blocks))
    wide = torch.from_numpy(weight).view(torch.float8_e4m3fn).double().numpy()
    scales = scale.repeat(128, 0)[:rows].repeat(128, 1)
    got = kernel(weight, scale, x, group, clusters)
    np.testing.assert_allclose(got, x @ (wide * scales).T, rtol=1e-9, atol=1e-6)


@given(st.integers(1, 40_000), st.integers(2, 192), st.integers(1, 80))
def test_a_group_leaves_no_warp_without_columns(rows, blocks, clusters):
    group = fp8_few.group_of(rows, 128 * blocks, clusters)
    assert 16 // group <= blocks // 2 and group in fp8_few.GROUPS


@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        (2112, 7168, 2),
        (12288, 1536, 16),
        (7168, 8192, 8),
        (18432, 7168, 4),
        (7168, 1024, 8),
        (2048, 7168, 2),
    ],
)
def test_the_group_of_a_weight(rows, columns, group):
    """V3's by two ranks, of 66 clusters: the fastest that an H200 showed, within 8 %."""
    assert fp8_few.group_of(rows, columns, 66) == group


@pytest.mark.parametrize(("without", "rest"), [
    (("deep_gemm",), "cuda.LinearScaledMm"),
    ((), "deep_gemm.LinearFp8"),
])  # fmt: skip
def test_which_calls_it_serves(tmp_path, without, rest):
    shutil.copy(FIXTURES / "deepseek-v3.json", tmp_path / "config.json")
    config = EngineConfig(model=str(tmp_path), plugins=("cuda", "triton"))
    binding = assemble(config, (), device="h200", without=without).binding
    shares = next(s for (op, _, module), s in binding.shares.items() if module.endswith("o_proj"))
    served = {
        rows: next((k for k in shares.some if k.rows.holds(rows)), shares.rest).name
        for rows in (1, 2, 8, 9, 4096)
    }
    few = "cuda.LinearFewFp8"
    assert served == {1: few, 2: rest if not without else few, 8: rest if not without else few,
                      9: rest, 4096: rest}  # fmt: skip
    assert shares.rest.name == "cuda.LinearScaledMm", json.dumps([k.name for k in shares.kernels])


def test_what_one_packed_the_other_reads(monkeypatch):
    from ds_runtime.ops.contract import DeviceInfo
    from ds_runtime.ops.reference.cases import Maker
    from ds_runtime_cuda.torch_ops import LinearScaledMm, LinearScaledMmPadded
    from ds_runtime_kit.checks.conformance import facts_for

    facts = facts_for(DeviceInfo("cuda", "a GPU", "sm90"), "bfloat16")
    make = Maker(facts, "few")
    few, x = fp8_few.LinearFewFp8(facts), make.normal(11, 1024)
    weight = make.weight(200, 1024, "fp8_block")
    want = x.double() @ weight.dequantise(torch.float64).T
    with standing_in(monkeypatch):
        for one in (LinearScaledMm(facts), few):
            got = few.apply(x, one.pack(weight, facts))
            assert (got.double() - want).norm() < 4e-3 * want.norm()
        odd_width = LinearScaledMmPadded(facts).pack(make.weight(200, 256, "fp8_block"), facts)
        with pytest.raises(TypeError):
            few.apply(x[:, :256], odd_width)
